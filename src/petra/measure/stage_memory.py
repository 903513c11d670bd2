"""Live bytes of every stage by purpose, counted from the tensors themselves on any device.

On the device "meta", the executor runs without computing anything, so the same classes predict the memory of a run of
any size.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from types import TracebackType

from torch import Tensor

from petra.measure.activations import Activations, non_activations, storages
from petra.pipeline import Executor


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage between two ticks or, from a `MemoryProbe`, with its activations at their peak.

    Memory with two purposes counts as the first of inputs, messages and graph. At the peak, `graph` includes all
    activations beyond the inputs and messages between ticks. Most of these are graphs; messages and gradients that
    exist only within the tick are included, too.
    """

    weights: int
    """Parameters and buffers."""
    optimizer: int
    """The state of the optimizer."""
    gradients: int
    """Gradients of parameters."""
    stashed_weights: int
    """Copies of older weights."""
    inputs: int
    """Saved inputs of micro-batches in flight."""
    messages: int
    """Messages that wait for the stage."""
    graph: int = 0
    """Tensors that autograd has saved."""
    synthesizer: int = 0
    """The synthesizer and its optimizer."""

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(asdict(self).values())

    @property
    def activations(self) -> int:
        """The bytes that depend on the batch: inputs, messages and graph."""
        return self.inputs + self.messages + self.graph


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages; a storage that several tensors share counts once.

    Args:
        tensors: The tensors.

    Returns:
        The number of bytes.
    """
    return sum(storage.nbytes() for storage in storages(tensors).values())


def at_rest(executor: Executor) -> list[StageMemory]:
    """Return the memory of every stage between two ticks.

    Args:
        executor: The executor.

    Returns:
        The memory of each stage of this process.
    """
    rows = []
    for stage in executor.stages:
        tensors = stage.tensors_by_category()
        row = {name.replace(" ", "_"): nbytes(found) for name, found in tensors.items()}
        counted = set(storages(non_activations(stage)))
        messages = executor.mailbox.tensors(stage.index)
        for name, found in (("inputs", tensors["inputs"]), ("messages", messages), ("graph", tensors["graph"])):
            own = storages(found)
            row[name] = sum(storage.nbytes() for key, storage in own.items() if key not in counted)
            counted |= own.keys()
        rows.append(StageMemory(**row))
    return rows


class MemoryProbe(AbstractContextManager["MemoryProbe"]):
    """Measures the memory of every stage while it is entered, usually for one tick.

    Args:
        executor: The executor to measure.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.rest = at_rest(executor)
        """The memory of every stage before the tick."""
        self._activations = Activations(executor)

    @property
    def activation_peak(self) -> int:
        """Peak bytes of the activations of all stages together."""
        return self._activations.peak

    @property
    def stages(self) -> list[StageMemory]:
        """The memory of each stage at the peak of its activations, as if it had its own device."""
        return [
            replace(row, graph=self._activations.stages[stage.index] - row.inputs - row.messages)
            for stage, row in zip(self.executor.stages, self.rest, strict=True)
        ]

    def __enter__(self) -> MemoryProbe:
        self._activations.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._activations.__exit__(kind, error, trace)
