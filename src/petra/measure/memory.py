"""Live bytes of every stage, by what they are for, counted from the tensors themselves on any device.

On the device "meta" the engine runs without computing anything, and the same instruments tell what a run
of any size would hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from types import TracebackType

from torch import Tensor

from petra.execution import LocalExecutor
from petra.measure.activations import Activations, fixed, storages


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage between two ticks; from a `MemoryProbe`, with its activations at their peak.

    Memory that is for two things at once counts for the first of inputs, messages and graph. At the peak, ``graph``
    is whatever a stage has beyond the inputs and messages between ticks: most of it is graphs, but messages and
    gradients that come and go within the tick are there too.
    """

    weights: int
    optimizer: int
    gradients: int
    stashed_weights: int
    inputs: int
    messages: int
    graph: int = 0
    synthesizer: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())

    @property
    def activations(self) -> int:
        """What depends on the batch: kept inputs, messages and graph."""
        return self.inputs + self.messages + self.graph


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' memory, shared memory counted once."""
    return sum(storage.nbytes() for storage in storages(tensors).values())


def at_rest(executor: LocalExecutor) -> list[StageMemory]:
    """What every stage holds now, between two ticks."""
    rows = []
    for stage in executor.stages:
        tensors = stage.held()
        held = {name.replace(" ", "_"): nbytes(found) for name, found in tensors.items()}
        known = set(storages(fixed(stage)))
        messages = executor.messages(stage.index)
        for name, found in (("inputs", tensors["inputs"]), ("messages", messages), ("graph", tensors["graph"])):
            own = storages(found)
            held[name] = sum(storage.nbytes() for key, storage in own.items() if key not in known)
            known |= own.keys()
        rows.append(StageMemory(**held))
    return rows


class MemoryProbe(AbstractContextManager["MemoryProbe"]):
    """Measures what happens inside it, usually one tick: what each stage holds, with `Activations` at their peak."""

    def __init__(self, executor: LocalExecutor) -> None:
        self.executor = executor
        self.rest = at_rest(executor)
        """Before the tick."""
        self._activations = Activations(executor)

    @property
    def activation_peak(self) -> int:
        """The most bytes of activations at any moment, of all stages together."""
        return self._activations.together

    @property
    def stages(self) -> list[StageMemory]:
        """Each stage with the peak of its activations, as on a device of its own."""
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
