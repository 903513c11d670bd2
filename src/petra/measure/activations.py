"""Peak bytes of live activations of every stage, as if each had its own device: Table 1 of Features Replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from types import TracebackType

import torch
from torch import Tensor

from petra.pipeline import Executor, Stage
from petra.reversible.streams import storage_id
from petra.schedule import Action

Storages = dict[int, torch.UntypedStorage]
"""Storages by their identity, which is unique as long as they are kept here."""


def storages(tensors: Iterable[Tensor]) -> Storages:
    """Return the storages of the tensors."""
    return {storage_id(t): t.untyped_storage() for t in tensors}


def non_activations(stage: Stage) -> list[Tensor]:
    """Return tensors that a graph may refer to, but that are no activations: weights, also of synthesizers."""
    copies = stage.stash.copies.values() if stage.stash is not None else ()
    synthesizer = stage.synthesizer.tensors() if stage.synthesizer is not None else []
    return [*stage.trained(), *chain.from_iterable(copies), *synthesizer]


class Activations(AbstractContextManager["Activations"]):
    """Counts activations while it is entered, usually for one tick of a full pipeline.

    The activations of a stage are its saved inputs, the messages that wait for it, the gradient at its outputs (of the
    loss, or predicted), its saved graphs, and all tensors that autograd saves while it computes. Each storage counts
    once. Weights, their gradients, stashed weights, and the states of optimizers and synthesizers do not count, nor do
    temporaries within one operation. A message that is taken counts until its action ends. A message from another rank
    that is used in the tick in which it arrives counts only if it is saved.

    Args:
        executor: The executor to observe.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.stages: Counter[int] = Counter()
        """Peak bytes of each stage. Their sum is the need of as many devices."""
        self.peak = 0
        """Peak bytes of all stages at the same time; memory that stages share counts once."""
        self._parameters = {stage.index: stage.parameters for stage in executor.stages}
        self._saved: dict[int, Counter[int]] = {}  # stage -> storage -> live tensors in it that autograd has saved
        self._bytes: dict[int, int] = {}  # of storages in _saved and _held
        self._graphs: dict[tuple[int, int], Storages] = {}  # by stage and micro-batch
        self._excluded: Storages = {}
        self._held: dict[int, Storages] = {}  # by stage
        self._stack = ExitStack()

    def __enter__(self) -> Activations:
        self._count_held()
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _SavedTensor.unpack))
        self.executor.observers.append(self._observe)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.executor.observers.remove(self._observe)
        self._stack.close()
        self._excluded, self._held, self._graphs = {}, {index: {} for index in self._held}, {}

    def _observe(self, tick: int, action: Action, stage: Stage) -> None:
        self._count_held()

    def _count_held(self) -> None:
        """Find the activations that stages hold between two actions, and count them with those in `_saved`."""
        self._excluded = {}
        held: dict[int, Storages] = {}
        graphs: dict[tuple[int, int], Storages] = {}
        for stage in self.executor.stages:
            self._excluded |= storages(non_activations(stage))
            inputs = [x for saved in stage.saved.values() for streams in saved.inputs for x in streams]
            own = storages([*inputs, *self.executor.mailbox.tensors(stage.index), *stage.waiting()])
            for microbatch, saved in stage.saved.items():
                if saved.graphs:
                    key = stage.index, microbatch
                    # Traversed once, because graphs do not change.
                    if key not in self._graphs:
                        self._graphs[key] = storages([x for tape in saved.graphs for x in tape.tensors()])
                    graphs[key] = self._graphs[key]
                    own |= graphs[key]
            held[stage.index] = own
        self._held, self._graphs = held, graphs
        self._users = Counter[int]()  # storage -> the number of stages that use it
        self._current = Counter[int]()  # stage -> bytes
        for index, own in held.items():
            self._bytes |= {key: storage.nbytes() for key, storage in own.items()}
            live = (own.keys() | self._saved.get(index, Counter()).keys()) - self._excluded.keys()
            self._current[index] = sum(self._bytes[key] for key in live)
            self._users.update(live)
        self._total = sum(self._bytes[key] for key in self._users)
        self._update_peaks()

    def _update_peaks(self) -> None:
        self.stages |= self._current
        self.peak = max(self.peak, self._total)

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        key, stage = storage_id(tensor), self.executor.acting
        # Corrections temporarily replace the values of parameters; the replacements are weights, too.
        if stage is None or key in self._excluded or key in map(storage_id, self._parameters[stage]):
            return _SavedTensor(tensor, None)
        saved = self._saved.setdefault(stage, Counter())
        saved[key] += 1
        if saved[key] == 1:
            self._bytes[key] = tensor.untyped_storage().nbytes()
            self._count_saved(stage, key, 1)
            self._update_peaks()
        return _SavedTensor(tensor, (self, stage))

    def _release(self, tensor: Tensor, stage: int) -> None:
        key, saved = storage_id(tensor), self._saved[stage]
        saved[key] -= 1
        if saved[key] == 0:
            del saved[key]
            self._count_saved(stage, key, -1)

    def _count_saved(self, stage: int, key: int, sign: int) -> None:
        """Add a storage that autograd has begun to save for a stage, or subtract one that it has released."""
        if key in self._held[stage]:  # counted already
            return
        self._current[stage] += sign * self._bytes[key]
        before = self._users[key]
        self._users[key] += sign
        if (before > 0) != (self._users[key] > 0):
            self._total += sign * self._bytes[key]


class _SavedTensor:
    """A tensor that autograd has saved. Its deletion is reported to its owner."""

    owner: tuple[Activations, int] | None = None  # for `__del__` if `__init__` has failed

    def __init__(self, tensor: Tensor, owner: tuple[Activations, int] | None) -> None:
        self.tensor = tensor.detach()  # the tensor itself could keep its own graph alive
        self.owner = owner

    def unpack(self) -> Tensor:
        return self.tensor

    def __del__(self) -> None:
        if self.owner is not None:
            activations, stage = self.owner
            activations._release(self.tensor, stage)
