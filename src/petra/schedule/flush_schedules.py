"""Pipelines that are flushed: before every update (GPipe, 1F1B), or after a number of updates.

The gradients of a pipeline that is flushed before every update are exact. Between this and PETRA, which never flushes,
lie the schedules that flush after every n updates (`FlushEverySchedule`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable

from petra.schedule.action import Action, Kind
from petra.schedule.async_schedule import AsyncSchedule, low_staleness
from petra.schedule.layout import lay_out
from petra.schedule.pipeline_schedule import PipelineSchedule, Tick


class FlushSchedule(PipelineSchedule):
    """Base class of synchronous pipelines: `accumulate` micro-batches form a group, then all stages update.

    The tick that reads the last micro-batch of a group performs the whole group. Each stage's program for a group is a
    list of actions; `lay_out` assigns them to phases by when their messages can arrive.
    """

    exact = True

    def tick(self, index: int, microbatches: int) -> Tick:
        if index >= microbatches or (index + 1) % self.accumulate:
            return ()
        return self._group(index + 1 - self.accumulate, self.accumulate)

    def final_tick(self, microbatches: int) -> Tick:
        rest = microbatches % self.accumulate
        return self._group(microbatches - rest, rest) if rest else ()

    def ticks(self, microbatches: int) -> int:
        return microbatches

    def position(self, index: int) -> Hashable:
        return index % self.accumulate

    def _group(self, start: int, size: int) -> Tick:
        programs = [
            [*self.program(stage, start, size), Action(stage, Kind.UPDATE, start + size - 1)]
            for stage in range(self.stages)
        ]
        return lay_out(programs)

    @abstractmethod
    def program(self, stage: int, start: int, size: int) -> list[Action]:
        """Return the forwards and backwards of a stage for one group of micro-batches.

        Args:
            stage: The stage, counted from 0.
            start: The first micro-batch of the group.
            size: The number of micro-batches in the group.

        Returns:
            The actions, in the order in which the stage performs them.
        """


class GPipeSchedule(FlushSchedule):
    """All forwards of a group, then all its backwards."""

    name = "gpipe"

    def program(self, stage: int, start: int, size: int) -> list[Action]:
        group = range(start, start + size)
        return [Action(stage, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in group]


class FlushEverySchedule(PipelineSchedule):
    """An asynchronous pipeline that is flushed after every n updates, or after every update of a warm-up.

    The tick that reads the last micro-batch before a flush also performs everything that is in flight, until all
    stages have made their update. The next tick begins to fill the pipeline again. Flushed after every update, the
    weights do not change between a forward and its backward: gradients are exact, and each stage performs the same
    actions in the same order as in 1F1B. Never flushed, it is the asynchronous pipeline.

    Args:
        schedule: The asynchronous pipeline.
        every: Flush after this many updates; None never flushes after the warm-up.
        until: Flush after each of the first `until` updates, whatever `every` says.

    Raises:
        ValueError: `every` or `until` is out of range.
    """

    def __init__(self, schedule: AsyncSchedule, every: int | None = 1, until: int = 0) -> None:
        super().__init__(schedule.stages, schedule.accumulate)
        if every is not None and every < 1:
            raise ValueError(f"flush:{every} has {every} updates between two flushes: give 1 or more, like flush:4")
        if until < 0:
            raise ValueError(f"flush_until is {until}: give the number of synchronous updates, 0 or more")
        self.schedule = schedule
        self.every = every
        self.until = until
        self.exact = every == 1
        self.name = schedule.name if every is None else f"flush:{every}"

    def tick(self, index: int, microbatches: int) -> Tick:
        start, size = self._group(min(index, microbatches - 1))
        read = microbatches - start if size is None else min(microbatches - start, size)
        phases = list(self.schedule.tick(index - start, read))
        if size is not None and index - start == size - 1 and read == size:
            for drain in range(size, self.schedule.ticks(size)):
                phases += self.schedule.tick(drain, size)
        return tuple(
            tuple(Action(action.stage, action.kind, action.microbatch + start) for action in phase) for phase in phases
        )

    def ticks(self, microbatches: int) -> int:
        if microbatches == 0:
            return 0
        start, size = self._group(microbatches - 1)
        if microbatches - start == size:
            return microbatches
        return start + self.schedule.ticks(microbatches - start)

    @property
    def cycle(self) -> int:
        return self.accumulate * (self.every or 1)

    def position(self, index: int) -> Hashable:
        start, size = self._group(index)
        local, settled = index - start, self.staleness(0) + 2 * self.accumulate
        if size is not None and local + 1 == size:
            return size, "flush"
        return size, local if local < settled else settled + (local - settled) % self.accumulate

    def after(self, updates: int) -> PipelineSchedule:
        return FlushEverySchedule(self.schedule, self.every, max(0, self.until - updates)) if self.until else self

    def staleness(self, stage: int) -> int:
        return self.schedule.staleness(stage)

    def delay(self, stage: int, updates: int = 0) -> float:
        return 0.0 if self.exact or updates < self.until else self.schedule.delay(stage)

    def _group(self, microbatch: int) -> tuple[int, int | None]:
        """Return the first micro-batch since the last flush, and the number between two flushes; None: no flush."""
        warmup = self.until * self.accumulate
        if microbatch < warmup:
            return microbatch - microbatch % self.accumulate, self.accumulate
        if self.every is None:
            return warmup, None
        size = self.every * self.accumulate
        return microbatch - (microbatch - warmup) % size, size


class OneFOneBSchedule(FlushEverySchedule):
    """As many forwards as there are stages above, then one forward and one backward in turn (1F1B).

    Args:
        stages: The number of stages, J.
        accumulate: The number of micro-batches per update, k.
    """

    name = "1f1b"

    def __init__(self, stages: int, accumulate: int = 1) -> None:
        super().__init__(low_staleness(stages, accumulate), every=1)
        self.name = "1f1b"
