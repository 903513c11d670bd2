"""The base class of all schedules: rules that say which actions happen in which tick.

A schedule is a pure function of the tick. It therefore serves training, where the number of micro-batches is not known
in advance, as well as a finite `ScheduleTable`. A tick is a sequence of phases. The actions of one phase are
independent of each other across stages, and read only messages sent in earlier phases. Within a phase, the actions of
one stage are in the order in which the stage performs them: forward, backward, update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

from petra.schedule.action import Action, Kind

Phase = tuple[Action, ...]
"""Actions that stages can perform at the same time."""
Tick = tuple[Phase, ...]
"""The phases of one tick, in order."""


class PipelineSchedule(ABC):
    """Decides which actions each stage performs in each tick.

    Args:
        stages: The number of stages, J.
        accumulate: The number of micro-batches per update, k.

    Raises:
        ValueError: `stages` or `accumulate` is less than 1.
    """

    name: str
    """The name printed in summaries."""
    exact: bool = False
    """True if no weight changes between a forward and its backward, so that gradients are those of backprop."""

    def __init__(self, stages: int, accumulate: int = 1) -> None:
        if stages < 1:
            raise ValueError(f"stages is {stages}, but a network needs at least one: give 1 or more")
        if accumulate < 1:
            raise ValueError(f"accumulate is {accumulate}: give the number of micro-batches per update, 1 or more")
        self.stages = stages
        self.accumulate = accumulate

    @abstractmethod
    def tick(self, index: int, microbatches: int) -> Tick:
        """Return the phases of one tick.

        Micro-batch `index` is read in tick `index`. If `microbatches <= index`, the pipeline is draining.

        Args:
            index: The tick, counted from 0.
            microbatches: The number of micro-batches that have been read so far, including this tick's.

        Returns:
            The phases, without those in which no stage acts.
        """

    @abstractmethod
    def ticks(self, microbatches: int) -> int:
        """Return the number of ticks until the given micro-batches have left the pipeline.

        Args:
            microbatches: The number of micro-batches that are read in total.

        Returns:
            The number of ticks, without `final_tick`.
        """

    def final_tick(self, microbatches: int) -> Tick:
        """Return one last tick for the gradients that fill no complete update.

        Args:
            microbatches: The number of micro-batches that were read in total.

        Returns:
            The phases of the tick; empty if `microbatches` is a multiple of `accumulate`.
        """
        if microbatches % self.accumulate == 0:
            return ()
        return (tuple(Action(stage, Kind.UPDATE, microbatches - 1) for stage in range(self.stages)),)

    @property
    def cycle(self) -> int:
        """The number of ticks after which the actions of a full pipeline are the same, on later micro-batches."""
        return self.accumulate

    def position(self, index: int) -> Hashable:
        """Return a value that is equal for ticks in which the stages perform the same actions on later micro-batches.

        Args:
            index: The tick, counted from 0. A micro-batch is read in it.

        Returns:
            The position of the tick in the cycle of the schedule.
        """
        return min(index, self.staleness(0)), index % self.accumulate

    def after(self, updates: int) -> PipelineSchedule:
        """Return the schedule that follows once the pipeline has been drained, whose ticks are counted from 0 again.

        Args:
            updates: The number of updates that every stage has made.

        Returns:
            The schedule; it is the same unless it changes in the course of training.
        """
        return self

    def delay(self, stage: int, updates: int = 0) -> float:
        """Return the mean number of updates between a forward and its backward.

        Args:
            stage: The stage, counted from 0.
            updates: The number of updates that the stage has made.

        Returns:
            The delay while the pipeline is full; 0 if gradients are exact.
        """
        return self.staleness(stage) / self.accumulate

    def staleness(self, stage: int) -> int:
        """Return the staleness τ of a stage.

        Args:
            stage: The stage, counted from 0.

        Returns:
            The number of ticks between a forward and its backward once the pipeline is full.
        """
        return 0

    def zero_gradient_updates(self, stage: int) -> int:
        """Return how many updates with zero gradients a stage makes before its first backward.

        Args:
            stage: The stage, counted from 0.

        Returns:
            The number of updates.
        """
        return 0

    def _backward(self, stage: int, microbatch: int) -> list[Action]:
        """Return a backward, and the update that follows every k-th backward of a stage (Alg. 1, line 20)."""
        actions = [Action(stage, Kind.BACKWARD, microbatch)]
        if (microbatch + 1) % self.accumulate == 0:
            actions.append(Action(stage, Kind.UPDATE, microbatch))
        return actions
