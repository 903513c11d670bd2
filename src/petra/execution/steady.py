"""The full pipeline: where its messages and stashes wait from tick to tick, and the ticks that were recorded of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra.execution.local import LocalExecutor
from petra.execution.queues import Copy, Queue, carry_out
from petra.execution.rates import Rates
from petra.execution.recorder import Repeat
from petra.execution.stage import Finished
from petra.execution.stash import WeightStash
from petra.methods import BackwardMessage, Kept
from petra.reversible.streams import Streams
from petra.schedule import Action


@dataclass
class Program:
    """One recorded tick."""

    repeat: Repeat
    fixed: Any
    """What must not have changed since: modes, settings, and where weights and the optimizer's state lie."""
    before: Any
    """Which micro-batches waited where, counted from the one that was read."""
    inputs: Streams
    targets: Any
    finished: list[Finished]
    """What reached the loss, micro-batches counted likewise, in memory that every replay writes again."""
    actions: list[Action]
    rates: Rates


class Versions(MutableMapping[int, list[Tensor]]):
    """The copies of a stash by the number of updates before them."""

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


class Steady:
    """The full pipeline with micro-batches of one shape: where things wait, and the ticks recorded so far."""

    def __init__(self, executor: LocalExecutor) -> None:
        stages = range(executor.order.stages)
        owner = weakref.proxy(executor)  # who has this: memory of the GPU is not to wait for a collector of garbage
        self.queues = [
            *(Queue(_member(executor.ups, s), tuple, tuple) for s in stages),
            *(Queue(_member(executor.downs, s), _take_apart, _put_together) for s in stages),
            *(Queue(lambda stage=stage: stage.kept, _inputs_of, _kept) for stage in executor.stages),  # type: ignore[misc]
            *(Queue(lambda s=s: Versions(s.stash), list, list) for s in executor.stages if s.stash is not None),  # type: ignore[misc]
            Queue(lambda: owner.targets, lambda t: t[0], lambda t: (t, 1.0)),
        ]
        self.programs: dict[int, Program] = {}
        """By their place in the cycle of accumulation."""
        self.slots: Tensor | None = None
        self._lengths: Tensor | None = None

    def settle(self, device: torch.device) -> None:
        """Bring everything that waits to its place."""
        found = [queue.settle() for queue in self.queues]
        carry_out(copy for _, copies in found for copy in copies)
        for queue in self.queues:
            queue.adopt()
        if self.slots is None:
            self.slots = torch.zeros(len(found), dtype=torch.int64, device=device)
            self._lengths = torch.tensor([max(1, len(queue.numbers)) for queue in self.queues], device=device)
        self.slots.copy_(torch.tensor([slot for slot, _ in found]))

    def fetch(self) -> None:
        """Have the oldest of each queue wait where the device says that it lies."""
        assert self.slots is not None
        for queue, slot in zip(self.queues, torch.split(self.slots, 1), strict=True):
            queue.fetch(slot)

    def store(self, more: Sequence[Copy]) -> None:
        """Lay newcomers in the places of the oldest, and do what ``more`` there is to copy."""
        assert self.slots is not None
        assert self._lengths is not None
        slots = torch.split(self.slots, 1)
        carry_out([*(c for queue, slot in zip(self.queues, slots, strict=True) for c in queue.store(slot)), *more])
        self.slots.add_(1).remainder_(self._lengths)


def _member(lists: list[dict[int, Any]], stage: int) -> Callable[[], dict[int, Any]]:
    return lambda: lists[stage]


def _take_apart(message: BackwardMessage) -> Any:
    return message.streams, message.gradients


def _put_together(parts: Any) -> BackwardMessage:
    return BackwardMessage(*parts)


def _inputs_of(kept: Kept) -> list[Streams]:
    return kept.inputs


def _kept(inputs: list[Streams]) -> Kept:
    return Kept(inputs=list(inputs))
