"""The state of a pipeline between ticks, in ring buffers, and the ticks that were captured of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra.cudagraph.graph_capture import Launch
from petra.cudagraph.lr_tensor import LearningRateTensor
from petra.cudagraph.ring_buffers import Copy, QueueChange, RingQueue, make_copies
from petra.methods import BackwardMessage, SavedState
from petra.pipeline import Executor, MicrobatchResult, Stage
from petra.pipeline.weight_stash import WeightStash
from petra.reversible.streams import Streams
from petra.schedule import Action, Kind


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
    """The actions, with micro-batches relative to the one that was read."""
    own: list[Action]
    """Those that change the state of this process."""
    changes: list[QueueChange]
    """How each queue changes."""
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
    """A pipeline with micro-batches of one shape: a ring queue for each place where something waits between ticks.

    Args:
        executor: A weak reference to the executor.
    """

    def __init__(self, executor: Executor) -> None:
        stages, mailbox = range(executor.schedule.stages), executor.mailbox
        owner = weakref.proxy(mailbox)  # a reference cycle would keep GPU memory until the garbage collector runs
        now = _microbatches(executor)
        forward, backward, last = Kind.FORWARD, Kind.BACKWARD, stages[-1]
        self.queues = [
            *(
                RingQueue(_member(mailbox.forward, s), tuple, tuple, now, _is(s, forward))
                for s in stages
                if executor.owns(s) and not mailbox.comes_from_other_rank(s, forward)
            ),
            *(
                RingQueue(_member(mailbox.backward, s.index), take_apart, put_together, now, _is(s.index, _taker(s)))
                for s in executor.stages
                if not mailbox.comes_from_other_rank(s.index, backward)
            ),
            *(RingQueue(_saved_by(s), _inputs_of, _saved, now, _is(s.index, backward)) for s in executor.stages),
            *(
                RingQueue(_versions_of(stage.stash), list, list, _updates_of(stage))
                for stage in executor.stages
                if stage.stash is not None
            ),
            RingQueue(lambda: owner.targets, lambda t: t[0], lambda t: (t, 1.0), now, _is(last, forward)),
        ]
        self.ticks: dict[Hashable, CapturedTick] = {}
        """Captured ticks by their position in the cycle of the schedule."""
        self.cursors: Tensor | None = None
        self._lengths: Tensor | None = None

    def observe(self) -> None:
        """Note what waits after a tick that was not captured, to know how much memory is needed."""
        for queue in self.queues:
            queue.observe()
        if any(queue.needs_memory() for queue in self.queues):
            self.ticks.clear()  # they use the memory so far, which `settle` replaces

    def settle(self, device: torch.device) -> None:
        """Move everything that waits into the ring buffers."""
        if self.cursors is None or any(queue.needs_memory() for queue in self.queues):
            for queue in self.queues:
                queue.allocate()
            self.cursors = torch.zeros(len(self.queues), dtype=torch.int64, device=device)
            self._lengths = torch.tensor([max(1, queue.slots) for queue in self.queues], device=device)
        make_copies(copy for queue in self.queues for copy in queue.settle())
        for queue in self.queues:
            queue.adopt()
        self.cursors.copy_(torch.tensor([queue.reference() % max(1, queue.slots) for queue in self.queues]))

    def fetch(self, actions: Sequence[Action]) -> None:
        """Read the entries that a tick takes from the slots that the device computes."""
        assert self.cursors is not None
        for queue, cursor in zip(self.queues, torch.split(self.cursors, 1), strict=True):
            queue.fetch(cursor, actions)

    def store(self, references: Sequence[int], more: Sequence[Copy]) -> list[QueueChange]:
        """Write the new entries into their slots, and make ``more`` copies at the same time.

        Args:
            references: The reference number of each queue before the tick.
            more: Copies to make.

        Returns:
            How each queue has changed.
        """
        assert self.cursors is not None
        assert self._lengths is not None
        queues = zip(self.queues, torch.split(self.cursors, 1), references, strict=True)
        found = [queue.store(cursor, reference) for queue, cursor, reference in queues]
        make_copies([*(copy for _, copies in found for copy in copies), *more])
        self.cursors.add_(1).remainder_(self._lengths)
        return [change for change, _ in found]

    def references(self) -> list[int]:
        """Return the reference number of each queue."""
        return [queue.reference() for queue in self.queues]

    def advance(self, changes: Sequence[QueueChange], references: Sequence[int]) -> None:
        """Do the host's part of a tick whose device work was launched as a graph."""
        for queue, change, reference in zip(self.queues, changes, references, strict=True):
            queue.advance(change, reference)


def _is(stage: int, kind: Kind) -> Callable[[Action], bool]:
    return lambda action: action.stage == stage and action.kind is kind


def _taker(stage: Stage) -> Kind:
    """Return the kind of action that takes the message from the stage above."""
    return Kind.BACKWARD if stage.synthesizer is None else Kind.LEARN


def _microbatches(executor: Executor) -> Callable[[], int]:
    return lambda: executor.microbatches


def _updates_of(stage: Stage) -> Callable[[], int]:
    return lambda: stage.updates


def _member(lists: list[dict[int, Any]], stage: int) -> Callable[[], dict[int, Any]]:
    return lambda: lists[stage]


def _saved_by(stage: Stage) -> Callable[[], dict[int, SavedState]]:
    return lambda: stage.saved


def _versions_of(stash: WeightStash) -> Callable[[], StashVersions]:
    return lambda: StashVersions(stash)


def take_apart(message: BackwardMessage) -> Any:
    """Return the parts of a message as a tree of tensors."""
    return message.streams, message.gradients


def put_together(parts: Any) -> BackwardMessage:
    """Return the message from its parts: the inverse of `take_apart`."""
    return BackwardMessage(*parts)


def _inputs_of(saved: SavedState) -> list[Streams]:
    return saved.inputs


def _saved(inputs: list[Streams]) -> SavedState:
    return SavedState(inputs=list(inputs))
