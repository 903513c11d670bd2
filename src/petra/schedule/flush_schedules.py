"""Synchronous pipelines, which are flushed before every update: GPipe and 1F1B."""

from __future__ import annotations

from abc import abstractmethod

from petra.schedule.action import Action, Kind
from petra.schedule.layout import lay_out
from petra.schedule.pipeline_schedule import PipelineSchedule, Tick


class FlushSchedule(PipelineSchedule):
    """Base class of synchronous pipelines: `accumulate` micro-batches form a group, then all stages update.

    The tick that reads the last micro-batch of a group performs the whole group. Each stage's program for a group is a
    list of actions; `lay_out` assigns them to phases by when their messages can arrive.
    """

    def tick(self, index: int, microbatches: int) -> Tick:
        if index >= microbatches or (index + 1) % self.accumulate:
            return ()
        return self._group(index + 1 - self.accumulate, self.accumulate)

    def final_tick(self, microbatches: int) -> Tick:
        rest = microbatches % self.accumulate
        return self._group(microbatches - rest, rest) if rest else ()

    def ticks(self, microbatches: int) -> int:
        return microbatches

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


class OneFOneBSchedule(FlushSchedule):
    """As many forwards as there are stages above, then one forward and one backward in turn (1F1B)."""

    name = "1f1b"

    def program(self, stage: int, start: int, size: int) -> list[Action]:
        warmup = min(size, self.stages - 1 - stage)
        group = range(start, start + size)
        actions = [Action(stage, Kind.FORWARD, m) for m in group[:warmup]]
        for m in group:
            if m + warmup < start + size:
                actions.append(Action(stage, Kind.FORWARD, m + warmup))
            actions.append(Action(stage, Kind.BACKWARD, m))
        return actions
