"""The repeating part of a schedule, as arrays: a full pipeline does the same in every cycle, on later micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from petra.schedule import Kind, PipelineSchedule

Array = NDArray[Any]

WEIGHT = "W"
"""The part of a backward that computes gradients of parameters. Schedules of the engine do not separate it."""
LETTERS = (*(kind.value for kind in Kind), WEIGHT)
"""All kinds of operations."""


class Operation(NamedTuple):
    """One action of one stage. Unlike `petra.schedule.Action`, it may be a part of a backward."""

    stage: int
    """The stage, counted from 0."""
    kind: str
    """One of `LETTERS`."""
    microbatch: int
    """The micro-batch, counted from the beginning of the cycle; below 0 if it was read in an earlier cycle."""


@dataclass(frozen=True)
class Step:
    """Operations of the same kind on different workers, none of which waits for another."""

    kind: str
    """One of `LETTERS`."""
    stages: Array
    """The stage of each operation."""
    workers: Array
    """Its worker."""
    microbatches: Array
    """Its micro-batch, counted from the beginning of the cycle."""


@dataclass(frozen=True)
class Cycle:
    """The actions of all workers in one cycle of a full pipeline.

    The steps are in an order in which a single process could perform them. Those of one worker are in the order in
    which it performs them.
    """

    name: str
    """The name of the schedule."""
    placement: tuple[int, ...]
    """The worker of each stage."""
    microbatches: int
    """The number of micro-batches that are read in a cycle."""
    updates: int
    """The number of updates of every stage in a cycle."""
    settles: int
    """The number of cycles after which durations are those of the steady state."""
    steps: tuple[Step, ...]
    """The operations."""

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @property
    def workers(self) -> int:
        """The number of workers."""
        return max(self.placement) + 1

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of operations."""
        return frozenset(step.kind for step in self.steps)

    @property
    def gradient_kind(self) -> str:
        """The kind of operation that uses the gradient from the next stage."""
        return Kind.LEARN.value if Kind.LEARN.value in self.kinds else Kind.BACKWARD.value

    @cached_property
    def operations(self) -> list[tuple[int, Operation]]:
        """All operations with their workers, in order."""
        return [
            (int(w), Operation(int(s), step.kind, int(m)))
            for step in self.steps
            for s, w, m in zip(step.stages, step.workers, step.microbatches, strict=True)
        ]

    @property
    def in_flight(self) -> Array:
        """For each stage, how many micro-batches are between forward and backward when a cycle begins."""
        return self.first("F") - self.first("B")

    def first(self, kind: str) -> Array:
        """Return the first micro-batch in a cycle for which each stage performs an operation.

        Args:
            kind: The kind of operation.

        Returns:
            The micro-batches, counted from the beginning of the cycle; 0 where a stage has no such operation.
        """
        found = np.zeros(self.stages, dtype=np.int64)
        for step in reversed(self.steps):
            if step.kind == kind:
                found[step.stages] = step.microbatches
        return found

    @cached_property
    def depth(self) -> int:
        """The largest number of messages of one kind that wait for a stage at the same time, in program order."""
        depth = 1
        sent = {kind: np.full(self.stages + 1, -(2**40)) for kind in ("F", "B")}
        for repeat in range(2):
            for step in self.steps:
                microbatches = step.microbatches + repeat * self.microbatches
                for kind, uses in (("F", "F"), ("B", self.gradient_kind)):
                    if step.kind == uses:
                        depth = max(depth, int((sent[kind][step.stages] - microbatches).max()) + 1)
                if step.kind == "F":
                    sent["F"][step.stages + 1] = microbatches
                elif step.kind == "B":
                    sent["B"][step.stages - 1] = microbatches
        return depth

    @classmethod
    def of(cls, schedule: PipelineSchedule, placement: Sequence[int] | None = None) -> Cycle:
        """Compile a schedule.

        Args:
            schedule: The schedule.
            placement: The worker of each stage; by default one worker per stage, or that of an interleaved schedule.

        Returns:
            The cycle.

        Raises:
            ValueError: The placement has another number of stages, or leaves a worker without a stage.
        """
        if placement is None:
            placement = getattr(schedule, "placement", range(schedule.stages))
        placement = _checked(placement, schedule.stages)
        length, filled = schedule.cycle, schedule.staleness(0)
        start = -(-filled // length) * length
        steps: list[Step] = []
        for index in range(start, start + length):
            for phase in schedule.tick(index, index + 1):
                found = (Operation(a.stage, a.kind.value, a.microbatch - start) for a in phase)
                steps += _steps(found, placement)
        # A bottleneck that involves all stages takes some rounds to show.
        settles = 3 if schedule.exact else -(-(4 * schedule.stages + 4 * filled) // length)
        updates = length // schedule.accumulate
        return cls(schedule.name, placement, length, updates, settles, tuple(steps))

    @classmethod
    def of_programs(
        cls, name: str, programs: Sequence[Sequence[Operation]], placement: Sequence[int], microbatches: int
    ) -> Cycle:
        """Compile a synchronous schedule from what each worker does for one update.

        Args:
            name: The name of the schedule.
            programs: The operations of each worker, in order, with its updates.
            placement: The worker of each stage.
            microbatches: The number of micro-batches of an update.

        Returns:
            The cycle.

        Raises:
            ValueError: Workers wait for each other forever, or the placement is wrong.
        """
        placement = _checked(placement, len(placement))
        stages, position, done = len(placement), [0] * len(programs), set[Operation]()
        steps: list[Step] = []
        waiting = sum(map(len, programs))
        while waiting:
            phase = []
            for worker, program in enumerate(programs):
                if position[worker] < len(program) and _sent(program[position[worker]], stages) <= done:
                    phase.append(program[position[worker]])
                    position[worker] += 1
            if not phase:
                stuck = ", ".join(str(p[at]) for p, at in zip(programs, position, strict=True) if at < len(p))
                raise ValueError(f"deadlock: each of these waits for another one's message: {stuck}")
            done.update(phase)
            waiting -= len(phase)
            steps += _steps(iter(phase), placement)
        return cls(name, placement, microbatches, 1, 3, tuple(steps))


def _checked(placement: Sequence[int], stages: int) -> tuple[int, ...]:
    found = tuple(map(int, placement))
    if len(found) != stages:
        raise ValueError(f"placement has {len(found)} workers for {stages} stages: give one worker for each stage")
    if set(found) != set(range(max(found) + 1)):
        raise ValueError(f"placement is {list(found)}: give each worker from 0 to {max(found)} at least one stage")
    return found


def _sent(operation: Operation, stages: int) -> set[Operation]:
    """Return the operation of another stage whose message this one uses, if any."""
    stage, kind, microbatch = operation
    if kind == "F" and stage > 0:
        return {Operation(stage - 1, "F", microbatch)}
    if kind == "B" and stage < stages - 1:
        return {Operation(stage + 1, "B", microbatch)}
    return set()


def _steps(phase: Iterator[Operation], placement: tuple[int, ...]) -> list[Step]:
    """Divide a phase into steps: the n-th operations of all workers, by kind."""
    count = dict[int, int]()
    found = dict[tuple[int, str], list[Operation]]()
    for operation in phase:
        worker = placement[operation.stage]
        number = count.get(worker, 0)
        count[worker] = number + 1
        found.setdefault((number, operation.kind), []).append(operation)
    steps = []
    for (_, kind), operations in sorted(found.items()):
        operations.sort()
        stages = np.array([operation.stage for operation in operations])
        workers = np.array([placement[operation.stage] for operation in operations])
        steps.append(Step(kind, stages, workers, np.array([operation.microbatch for operation in operations])))
    return steps
