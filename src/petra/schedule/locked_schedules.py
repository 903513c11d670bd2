"""Schedules with a locked forward pass: backprop, Features Replay and DNI."""

from __future__ import annotations

from math import ceil

from petra.schedule.action import Action, Kind
from petra.schedule.pipeline_schedule import PipelineSchedule, Tick


class SequentialSchedule(PipelineSchedule):
    """One micro-batch at a time passes forward and backward through all stages, without overlap or staleness.

    This is ordinary backprop. With stages on several devices, it is basic model parallelism.
    """

    name = "sequential"
    exact = True

    def tick(self, index: int, microbatches: int) -> Tick:
        if index >= microbatches:
            return ()
        up = [(Action(stage, Kind.FORWARD, index),) for stage in range(self.stages)]
        down = [tuple(self._backward(stage, index)) for stage in reversed(range(self.stages))]
        return (*up, *down)

    def ticks(self, microbatches: int) -> int:
        return microbatches


class LockedForwardSchedule(PipelineSchedule):
    """All stages perform the forward of a micro-batch in turn; then all perform a backward at the same time.

    Features Replay, Alg. 1: in iteration t, stage s performs the backward of micro-batch t - (J-1-s), with the gradient
    that the stage above computed in iteration t-1. Each stage performs the same actions in the same order as in
    `low_staleness`, with one exception: the features before the first micro-batch are zero, and so are their
    gradients. In its first J-1-s iterations, stage s therefore makes its updates with zero gradients.
    """

    name = "locked-forward"

    def tick(self, index: int, microbatches: int) -> Tick:
        up = [(Action(stage, Kind.FORWARD, index),) for stage in range(self.stages)] if index < microbatches else []
        down: list[Action] = []
        for stage in range(self.stages):
            microbatch = index - self.staleness(stage)
            if microbatch < microbatches:
                actions = self._backward(stage, microbatch)
                down.extend(actions if microbatch >= 0 else actions[1:])
        return (*up, tuple(down)) if down else tuple(up)

    def ticks(self, microbatches: int) -> int:
        return microbatches + self.stages - 1 if microbatches else 0

    def staleness(self, stage: int) -> int:
        return self.stages - 1 - stage

    def zero_gradient_updates(self, stage: int) -> int:
        return ceil(self.staleness(stage) / self.accumulate)


class DecoupledSchedule(PipelineSchedule):
    """Each stage performs its backward and update right after its forward, with a predicted gradient (DNI).

    The stage above sends its gradient back later in the same tick. The stage's synthesizer learns from it.
    """

    name = "decoupled"

    def tick(self, index: int, microbatches: int) -> Tick:
        if index >= microbatches:
            return ()
        phases: list[list[Action]] = [[] for _ in range(self.stages + 1)]
        for stage in range(self.stages):
            phases[stage] += [Action(stage, Kind.FORWARD, index), *self._backward(stage, index)]
            if stage < self.stages - 1:
                phases[stage + 2].append(Action(stage, Kind.LEARN, index))
        return tuple(tuple(phase) for phase in phases if phase)

    def ticks(self, microbatches: int) -> int:
        return microbatches
