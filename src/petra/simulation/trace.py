"""The operations of one replica with their times, and the memory of its workers that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from petra.simulation.costs import StageCosts
from petra.simulation.cycle import WEIGHT, Array, Cycle


@dataclass(frozen=True)
class Event:
    """One operation of the simulation."""

    worker: int
    """The worker."""
    stage: int
    """The stage."""
    kind: str
    """The kind of operation, as in `Cycle`."""
    microbatch: int
    """The micro-batch."""
    start: float
    """Seconds since the beginning of the simulation."""
    end: float
    """Seconds since the beginning of the simulation."""


@dataclass
class Trace:
    """The last cycles of a simulation, of the first replica."""

    cycle: Cycle
    """The cycle that was repeated."""
    costs: Sequence[StageCosts]
    """The costs of each stage."""
    records: list[tuple[int, Array, Array, Array, Array]] = field(default_factory=list)
    """For each step: its index, micro-batches, starts, ends, and when messages had left."""

    def add(self, step: int, microbatches: Array, start: Array, end: Array, left: Array) -> None:
        """Add the operations of a step.

        Args:
            step: Its index in the cycle.
            microbatches: The micro-batch of each operation, counted from the beginning of the simulation.
            start: When each of them begins.
            end: When it ends.
            left: When its message has left.
        """
        self.records.append((step, microbatches, start.copy(), end.copy(), left.copy()))

    def events(self) -> list[Event]:
        """Return the operations.

        Returns:
            All of them, in program order.
        """
        found = []
        for index, microbatches, start, end, _ in self.records:
            step = self.cycle.steps[index]
            columns = (step.workers, step.stages, microbatches, start, end)
            for worker, stage, microbatch, begin, stop in zip(*(c.tolist() for c in columns), strict=True):
                found.append(Event(worker, stage, step.kind, microbatch, begin, stop))
        return found

    def memory(self) -> tuple[Array, Array, Array]:
        """Return the memory of all workers as a function of time.

        It consists of what is resident, what is saved between forwards and backwards, what a running backward needs,
        and messages: at their receiver from when they are sent until the operation that uses them has ended, and at
        their sender until they have left.

        Returns:
            Workers, times and bytes from these times on. Each worker begins at time minus infinity.
        """
        workers, times, changes = (np.concatenate(column) for column in zip(*self._changes, strict=True))
        order = np.lexsort((changes, times, workers))  # what is freed at a moment can be used again at once
        workers, times, changes = workers[order], times[order], changes[order]
        total = np.cumsum(changes)
        first = np.searchsorted(workers, np.arange(self.cycle.workers))
        before = np.where(first > 0, total[first - 1], 0.0)
        return workers, times, total - before[workers]

    def peaks(self) -> Array:
        """Return the peak memory of each worker.

        Returns:
            Bytes.
        """
        workers, times, size = self.memory()
        begun = np.zeros(self.cycle.workers)
        for index, _, start, _, _ in reversed(self.records):
            begun[self.cycle.steps[index].workers] = start
        # Before all workers have begun with the recorded cycles, messages in transit are counted as if they were there.
        seen = times >= begun.max()
        peaks = np.full(self.cycle.workers, -np.inf)
        np.maximum.at(peaks, workers[seen], size[seen])
        missing = np.isinf(peaks)
        if missing.any():
            every = np.full(self.cycle.workers, -np.inf)
            np.maximum.at(every, workers, size)
            peaks = np.where(missing, every, peaks)
        return peaks

    @cached_property
    def _changes(self) -> list[tuple[Array, Array, Array]]:
        """Workers, times and changes of bytes."""
        cycle, placement = self.cycle, np.array(self.cycle.placement)
        bytes_of = {
            name: np.array([getattr(cost, name) for cost in self.costs])
            for name in ("resident_bytes", "saved_bytes", "working_bytes", "forward_bytes", "backward_bytes")
        }
        found = [self._at_the_beginning(placement, bytes_of)]
        freed_by = WEIGHT if WEIGHT in cycle.kinds else "B"
        for index, _, start, end, left in self.records:
            step = cycle.steps[index]
            stages, workers = step.stages, step.workers
            saved, working = bytes_of["saved_bytes"][stages], bytes_of["working_bytes"][stages]
            if step.kind == "F":
                found.append((workers, end, saved))
            elif step.kind == freed_by:
                found.append((workers, end, -saved))
            if step.kind in ("B", WEIGHT):
                found += [(workers, start, working), (workers, end, -working)]
            for kind, uses, direction, name in (
                ("F", "F", 1, "forward_bytes"),
                ("B", cycle.gradient_kind, -1, "backward_bytes"),
            ):
                if step.kind == kind:
                    to = stages + direction
                    inside = (to >= 0) & (to < cycle.stages)
                    size = bytes_of[name][stages[inside]]
                    sender, receiver = workers[inside], placement[to[inside]]
                    found.append((receiver, end[inside], size))
                    held = np.where(sender == receiver, 0.0, size)
                    found += [(sender, end[inside], held), (sender, left[inside], -held)]
                if step.kind == uses:
                    source = stages - direction
                    inside = (source >= 0) & (source < cycle.stages)
                    found.append((workers[inside], end[inside], -bytes_of[name][source[inside]]))
        return found

    def _at_the_beginning(self, placement: Array, bytes_of: dict[str, Array]) -> tuple[Array, Array, Array]:
        """Return what every worker has when the first recorded cycle begins."""
        cycle = self.cycle
        start = np.zeros(cycle.workers)
        np.add.at(start, placement, bytes_of["resident_bytes"] + cycle.in_flight * bytes_of["saved_bytes"])
        for kind, uses, direction, name in (
            ("F", "F", 1, "forward_bytes"),
            ("B", cycle.gradient_kind, -1, "backward_bytes"),
        ):
            sent, used = cycle.first(kind), cycle.first(uses)
            for stage in range(cycle.stages):
                to = stage + direction
                if 0 <= to < cycle.stages:
                    start[placement[to]] += (sent[stage] - used[to]) * bytes_of[name][stage]
        return np.arange(cycle.workers), np.full(cycle.workers, -np.inf), start
