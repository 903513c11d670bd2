"""Live bytes of every stage, by what they are for, counted from the tensors themselves on any device.

On the device "meta" the engine runs without computing anything, and the same instruments tell what a run
of any size would hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, fields
from types import TracebackType

import torch
from torch import Tensor

from petra.execution import LocalExecutor, Stage
from petra.reversible.streams import storage_id
from petra.schedule import Action
from petra.tables import render


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage: at rest between two ticks, and ``graph`` at its peak if it comes from within a tick."""

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
    storages = {storage_id(t): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def at_rest(executor: LocalExecutor) -> list[StageMemory]:
    """What every stage holds now, between two ticks."""
    rows = []
    for stage in executor.stages:
        tensors = stage.held()
        messages = executor.messages(stage.index)
        held = {name.replace(" ", "_"): nbytes(found) for name, found in tensors.items()}
        held["graph"] = nbytes(_others(tensors["graph"], [*_fixed(tensors), *tensors["inputs"], *messages]))
        rows.append(StageMemory(**held, messages=nbytes(messages)))
    return rows


def _fixed(held: dict[str, list[Tensor]]) -> list[Tensor]:
    """What a graph may point to without holding it."""
    return [*held["weights"], *held["stashed weights"]]


def _others(tensors: Iterable[Tensor], known: Iterable[Tensor]) -> list[Tensor]:
    """Those in memory of their own."""
    there = {storage_id(t) for t in known}
    return [t for t in tensors if storage_id(t) not in there]


class MemoryProbe(AbstractContextManager["MemoryProbe"]):
    """Measures what happens inside it, usually one tick: peak graph bytes of each stage and of them all.

    Graphs are counted through autograd's hooks for saved tensors; memory that belongs to weights, messages
    or kept inputs anyway is not counted again.
    """

    def __init__(self, executor: LocalExecutor) -> None:
        self.executor = executor
        self.rest = at_rest(executor)
        """Before the tick."""
        self.activation_peak = 0
        """The most bytes of kept inputs, messages and graphs at any moment, of all stages together."""
        self._graph = Counter[int]()  # stage -> live bytes
        self._peak = Counter[int]()
        self._users = Counter[int]()  # storage -> saved tensors in it
        # Graphs that were there before, of which no hook tells when they go.
        self._old = {
            (stage.index, microbatch): kept.tape.tensors()
            for stage in executor.stages
            for microbatch, kept in stage.kept.items()
            if kept.tape is not None
        }
        self._lasting = Counter[int]()  # stage -> their bytes
        self._stack = ExitStack()

    @property
    def stages(self) -> list[StageMemory]:
        """Each stage with the peak of its graph."""
        rows = zip(self.executor.stages, self.rest, strict=True)
        return [StageMemory(**{**asdict(row), "graph": self._peak[stage.index]}) for stage, row in rows]

    def __enter__(self) -> MemoryProbe:
        self._survey()
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
        self.executor.observers.append(self._observe)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.executor.observers.remove(self._observe)
        self._stack.close()

    def _observe(self, tick: int, action: Action, stage: Stage) -> None:
        self._survey()

    def _survey(self) -> None:
        """Look at what is held between two actions."""
        held, fixed = [], []
        for stage in self.executor.stages:
            tensors = stage.held()
            held += [*tensors["inputs"], *self.executor.messages(stage.index)]
            fixed += _fixed(tensors)
        known = (*held, *fixed)
        self._known = {storage_id(t) for t in known}
        old: list[Tensor] = []
        for stage in self.executor.stages:
            here = [t for m in stage.kept for t in self._old.get((stage.index, m), ())]
            self._lasting[stage.index] = nbytes(_others(here, known))
            self._peak[stage.index] = max(self._peak[stage.index], self._graph_of(stage.index))
            old += here
        self._resting = nbytes([*held, *_others(old, known)])
        self._note()

    def _graph_of(self, stage: int) -> int:
        return self._lasting[stage] + self._graph[stage]

    def _note(self) -> None:
        self.activation_peak = max(self.activation_peak, self._resting + self._graph.total())

    def _pack(self, tensor: Tensor) -> _Saved:
        storage = tensor.untyped_storage()
        stage = self.executor.acting
        if stage is None or storage_id(tensor) in self._known:
            return _Saved(tensor, None)
        self._users[storage_id(tensor)] += 1
        if self._users[storage_id(tensor)] == 1:
            self._graph[stage] += storage.nbytes()
            self._peak[stage] = max(self._peak[stage], self._graph_of(stage))
            self._note()
        return _Saved(tensor, (self, stage))

    @staticmethod
    def _unpack(saved: _Saved) -> Tensor:
        return saved.tensor

    def _release(self, tensor: Tensor, stage: int) -> None:
        self._users[storage_id(tensor)] -= 1
        if self._users[storage_id(tensor)] == 0:
            self._graph[stage] -= tensor.untyped_storage().nbytes()


class _Saved:
    """A tensor that autograd keeps; tells the probe when it is let go."""

    owner: tuple[MemoryProbe, int] | None = None  # also of one that could not be made

    def __init__(self, tensor: Tensor, owner: tuple[MemoryProbe, int] | None) -> None:
        self.tensor = tensor.detach()  # the tensor itself could hold its own graph alive
        self.owner = owner

    def __del__(self) -> None:
        if self.owner is not None:
            probe, stage = self.owner
            probe._release(self.tensor, stage)


def table(rows: list[StageMemory]) -> str:
    """A row a stage, in MiB."""
    names = [field.name for field in fields(StageMemory)]
    header = ["stage", *(name.replace("_", " ") for name in names), "total"]
    cells = [[*(getattr(row, name) for name in names), row.total] for row in rows]
    return render(header, [[i, *(f"{c / 2**20:.2f}" for c in row)] for i, row in enumerate(cells)])
