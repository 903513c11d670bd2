"""Live bytes of activations at their peak, as on a device for every stage: Table 1 of Features Replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from types import TracebackType

import torch
from torch import Tensor

from petra.execution import LocalExecutor, Stage
from petra.reversible.streams import storage_id
from petra.schedule import Action

Storages = dict[int, torch.UntypedStorage]
"""By their identity, which nothing else can have as long as they are kept here."""


def storages(tensors: Iterable[Tensor]) -> Storages:
    """The memory that the tensors lie in."""
    return {storage_id(t): t.untyped_storage() for t in tensors}


def fixed(stage: Stage) -> list[Tensor]:
    """What is no activation, though a graph may point to it: whatever learns, and older weights."""
    copies = stage.stash.copies.values() if stage.stash is not None else ()
    learning = stage.synthesizer.tensors() if stage.synthesizer is not None else []
    return [*stage.trained(), *chain.from_iterable(copies), *learning]


class Activations(AbstractContextManager["Activations"]):
    """Watches what happens inside it, usually one tick of a full pipeline.

    Activations of a stage are the inputs that it keeps, the messages that wait for it, the gradient at its own outputs
    (of the loss, or predicted), the graphs that it keeps, and whatever autograd saves while it is at work, each piece
    of memory once. Weights, their gradients, stashed weights, optimizers and the weights of synthesizers are not among
    them, nor is what lives within one operation only. A message that is taken counts until the action is over; one
    from another rank that is used in the tick in which it comes, as far as it is saved or kept.
    """

    def __init__(self, executor: LocalExecutor) -> None:
        self.executor = executor
        self.stages: Counter[int] = Counter()
        """The most bytes that each stage has had at one moment. Summed, they are what as many devices need."""
        self.together = 0
        """The most bytes that all of them have had at one moment, memory that they share counted once."""
        self._parameters = {stage.index: stage.parameters for stage in executor.stages}
        self._saved: dict[int, Counter[int]] = {}  # stage -> storage -> live tensors in it that autograd has saved
        self._bytes: dict[int, int] = {}  # of storages in _saved and _held
        self._graphs: dict[tuple[int, int], Storages] = {}  # by stage and micro-batch
        self._fixed: Storages = {}
        self._held: dict[int, Storages] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Activations:
        self._survey()
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _Saved.get))
        self.executor.observers.append(self._observe)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.executor.observers.remove(self._observe)
        self._stack.close()
        self._fixed, self._held, self._graphs = {}, {index: {} for index in self._held}, {}

    def _observe(self, tick: int, action: Action, stage: Stage) -> None:
        self._survey()

    def _survey(self) -> None:
        """Look at what is held between two actions, and count it together with what is saved."""
        self._fixed = {}
        held: dict[int, Storages] = {}
        graphs: dict[tuple[int, int], Storages] = {}
        for stage in self.executor.stages:
            self._fixed |= storages(fixed(stage))
            inputs = [x for kept in stage.kept.values() for streams in kept.inputs for x in streams]
            own = storages([*inputs, *self.executor.messages(stage.index), *stage.waiting()])
            for microbatch, kept in stage.kept.items():
                if kept.tape is not None:
                    key = stage.index, microbatch
                    # Looked at once, for graphs do not change.
                    graphs[key] = self._graphs[key] if key in self._graphs else storages(kept.tape.tensors())
                    own |= graphs[key]
            held[stage.index] = own
        self._held, self._graphs = held, graphs
        self._everything = Counter[int]()
        self._now = Counter[int]()
        for index, own in held.items():
            self._bytes |= {key: storage.nbytes() for key, storage in own.items()}
            live = (own.keys() | self._saved.get(index, Counter()).keys()) - self._fixed.keys()
            self._now[index] = sum(self._bytes[key] for key in live)
            self._everything.update(live)
        self._total = sum(self._bytes[key] for key in self._everything)
        self._note()

    def _note(self) -> None:
        self.stages |= self._now
        self.together = max(self.together, self._total)

    def _pack(self, tensor: Tensor) -> _Saved:
        key, stage = storage_id(tensor), self.executor.acting
        # Corrections give parameters other values for a while, which are weights nevertheless.
        if stage is None or key in self._fixed or key in map(storage_id, self._parameters[stage]):
            return _Saved(tensor, None)
        saved = self._saved.setdefault(stage, Counter())
        saved[key] += 1
        if saved[key] == 1:
            self._bytes[key] = tensor.untyped_storage().nbytes()
            self._count(stage, key, 1)
            self._note()
        return _Saved(tensor, (self, stage))

    def _release(self, tensor: Tensor, stage: int) -> None:
        key, saved = storage_id(tensor), self._saved[stage]
        saved[key] -= 1
        if saved[key] == 0:
            del saved[key]
            self._count(stage, key, -1)

    def _count(self, stage: int, key: int, sign: int) -> None:
        """A storage is saved by a stage for the first time, or no longer; it may be held besides."""
        if key in self._held[stage]:
            return
        self._now[stage] += sign * self._bytes[key]
        before = self._everything[key]
        self._everything[key] += sign
        if (before > 0) != (self._everything[key] > 0):
            self._total += sign * self._bytes[key]


class _Saved:
    """A tensor that autograd keeps; tells when it is let go."""

    owner: tuple[Activations, int] | None = None  # also of one that could not be made

    def __init__(self, tensor: Tensor, owner: tuple[Activations, int] | None) -> None:
        self.tensor = tensor.detach()  # the tensor itself could hold its own graph alive
        self.owner = owner

    def get(self) -> Tensor:
        return self.tensor

    def __del__(self) -> None:
        if self.owner is not None:
            activations, stage = self.owner
            activations._release(self.tensor, stage)
