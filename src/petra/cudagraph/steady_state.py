"""The state of a full pipeline between ticks, in ring buffers, and the ticks that were captured of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra.cudagraph.graph_capture import Launch
from petra.cudagraph.lr_tensor import LearningRateTensor
from petra.cudagraph.ring_buffers import Copy, RingQueue, make_copies
from petra.methods import BackwardMessage, SavedState
from petra.pipeline import Executor, MicrobatchResult, Stage
from petra.pipeline.weight_stash import WeightStash
from petra.reversible.streams import Streams
from petra.schedule import Action


@dataclass
class CapturedTick:
    """One captured tick."""

    launch: Launch
    guards: Any
    """Modes, settings and addresses of weights and optimizer state, which must not have changed since."""
    before: Any
    """Which micro-batches waited where, relative to the one that was read."""
    inputs: Streams
    """Static memory, into which the inputs of each launch are copied."""
    targets: Any
    results: list[MicrobatchResult]
    """The results of the tick, with relative micro-batch numbers, in static memory that every launch overwrites."""
    actions: list[Action]
    rates: LearningRateTensor


class StashVersions(MutableMapping[int, list[Tensor]]):
    """The copies of a weight stash by the number of updates before them."""

    def __init__(self, stash: WeightStash) -> None:
        self._copies = stash.copies

    def __getitem__(self, version: int) -> list[Tensor]:
        return self._copies[version, 0, 0]

    def __setitem__(self, version: int, weights: list[Tensor]) -> None:
        self._copies[version, 0, 0] = weights

    def __delitem__(self, version: int) -> None:
        del self._copies[version, 0, 0]

    def __iter__(self) -> Iterator[int]:
        return (version for version, *_ in self._copies)

    def __len__(self) -> int:
        return len(self._copies)


class SteadyState:
    """A full pipeline with micro-batches of one shape: a ring queue for each place where something waits."""

    def __init__(self, executor: Executor) -> None:
        stages, mailbox = range(executor.schedule.stages), executor.mailbox
        owner = weakref.proxy(mailbox)  # a reference cycle would keep GPU memory until the garbage collector runs
        self.queues = [
            *(RingQueue(_member(mailbox.forward, s), tuple, tuple) for s in stages),
            *(RingQueue(_member(mailbox.backward, s), _take_apart, _put_together) for s in stages),
            *(RingQueue(_saved_by(stage), _inputs_of, _saved) for stage in executor.stages),
            *(RingQueue(_versions_of(stage.stash), list, list) for stage in executor.stages if stage.stash is not None),
            RingQueue(lambda: owner.targets, lambda t: t[0], lambda t: (t, 1.0)),
        ]
        self.ticks: dict[int, CapturedTick] = {}
        """Captured ticks by their position in the accumulation cycle."""
        self.slots: Tensor | None = None
        self._lengths: Tensor | None = None

    def settle(self, device: torch.device) -> None:
        """Move everything that waits into the ring buffers."""
        found = [queue.settle() for queue in self.queues]
        make_copies(copy for _, copies in found for copy in copies)
        for queue in self.queues:
            queue.adopt()
        if self.slots is None:
            self.slots = torch.zeros(len(found), dtype=torch.int64, device=device)
            self._lengths = torch.tensor([max(1, len(queue.numbers)) for queue in self.queues], device=device)
        self.slots.copy_(torch.tensor([slot for slot, _ in found]))

    def fetch(self) -> None:
        """Read the oldest entry of each queue from the slot that the device holds."""
        assert self.slots is not None
        for queue, slot in zip(self.queues, torch.split(self.slots, 1), strict=True):
            queue.fetch(slot)

    def store(self, more: Sequence[Copy]) -> None:
        """Write the new entries into the slots of the oldest, and make ``more`` copies at the same time."""
        assert self.slots is not None
        assert self._lengths is not None
        slots = torch.split(self.slots, 1)
        make_copies([*(c for queue, slot in zip(self.queues, slots, strict=True) for c in queue.store(slot)), *more])
        self.slots.add_(1).remainder_(self._lengths)

    def advance(self) -> None:
        """Do the host's part of a tick whose device work was launched as a graph."""
        for queue in self.queues:
            queue.advance()


def _member(lists: list[dict[int, Any]], stage: int) -> Callable[[], dict[int, Any]]:
    return lambda: lists[stage]


def _saved_by(stage: Stage) -> Callable[[], dict[int, SavedState]]:
    return lambda: stage.saved


def _versions_of(stash: WeightStash) -> Callable[[], StashVersions]:
    return lambda: StashVersions(stash)


def _take_apart(message: BackwardMessage) -> Any:
    return message.streams, message.gradients


def _put_together(parts: Any) -> BackwardMessage:
    return BackwardMessage(*parts)


def _inputs_of(saved: SavedState) -> list[Streams]:
    return saved.inputs


def _saved(inputs: list[Streams]) -> SavedState:
    return SavedState(inputs=list(inputs))
