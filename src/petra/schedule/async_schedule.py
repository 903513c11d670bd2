"""Asynchronous pipelines, in which every stage is always busy and gradients are stale: PETRA's schedules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, inf
from numbers import Integral

from petra.schedule.action import Action, Kind
from petra.schedule.pipeline_schedule import Phase, PipelineSchedule, Tick


class AsyncSchedule(PipelineSchedule):
    """Every stage performs one forward and one backward per tick, on different micro-batches.

    Stage s has n_s = `in_flight[s]` micro-batches between its forwards and its backwards. It first performs n_s
    forwards, and then alternates one forward with one backward and update. A tick consists of two slots. A message
    sent in one slot can be used in the next. The delay is split evenly between the two directions:

        forward  of micro-batch m at stage s in slot 2m + n_0 - n_s
        backward of micro-batch m at stage s in slot 2m + n_0 + n_s

    The staleness is n_s ticks. The paper's lock-step schedule has n_s = 2(J-1-s): all stages use the first slot of a
    tick. The schedule with the least staleness has n_s = J-1-s: even and odd stages alternate.

    Args:
        in_flight: The number n_s for each stage. It decreases from stage to stage and ends with 0.
        accumulate: The number of micro-batches per update, k.
        name: The name printed in summaries.

    Raises:
        ValueError: `in_flight` contains other values than integers that decrease to 0.
    """

    def __init__(self, in_flight: Sequence[int], accumulate: int = 1, name: str = "pipelined") -> None:
        super().__init__(len(in_flight), accumulate)
        decreasing = in_flight[-1] == 0 and all(below > above for below, above in pairwise(in_flight))
        if not decreasing or not all(isinstance(n, Integral) for n in in_flight):
            raise ValueError(
                f"in_flight is {list(in_flight)}, but it must decrease from stage to stage and end with 0: give "
                f"integers such as {list(range(len(in_flight) - 1, -1, -1))}"
            )
        self.in_flight = tuple(in_flight)
        self.name = name

    def tick(self, index: int, microbatches: int) -> Tick:
        slots = (self._slot(slot, microbatches) for slot in (2 * index, 2 * index + 1))
        return tuple(slot for slot in slots if slot)

    def _slot(self, slot: int, microbatches: int) -> Phase:
        actions: list[Action] = []
        first = self.in_flight[0]
        for stage, n in enumerate(self.in_flight):
            forward, odd = divmod(slot - (first - n), 2)
            if odd:
                continue
            if 0 <= forward < microbatches:
                actions.append(Action(stage, Kind.FORWARD, forward))
            backward = forward - n
            if 0 <= backward < microbatches:
                actions.extend(self._backward(stage, backward))
        return tuple(actions)

    def ticks(self, microbatches: int) -> int:
        return microbatches + self.in_flight[0] if microbatches else 0

    def staleness(self, stage: int) -> int:
        return self.in_flight[stage]


def lock_step(stages: int, accumulate: int = 1) -> AsyncSchedule:
    """Return the paper's schedule: a message is used one tick after it was sent, so τ_s = 2(J-1-s).

    Args:
        stages: The number of stages, J.
        accumulate: The number of micro-batches per update, k.

    Returns:
        The schedule.
    """
    return AsyncSchedule([2 * (stages - 1 - stage) for stage in range(stages)], accumulate, "lock-step")


def low_staleness(stages: int, accumulate: int = 1, latency: float = 0.0) -> AsyncSchedule:
    """Return the schedule with the least staleness that keeps every stage busy: n_s = ceil((J-1-s)(1 + 2c/T)).

    Args:
        stages: The number of stages, J.
        accumulate: The number of micro-batches per update, k.
        latency: c/T, the time a message takes divided by the time of a stage's forward and backward.

    Returns:
        The schedule.

    Raises:
        ValueError: `latency` is negative, infinite or NaN.
    """
    if not 0 <= latency < inf:
        raise ValueError(f"latency is {latency}: give the time of a message divided by that of a tick, 0 or more")
    # The small term absorbs floating-point errors, which would round up to one more micro-batch in flight.
    in_flight = [ceil((stages - 1 - stage) * (1 + 2 * latency) - 1e-9) for stage in range(stages)]
    return AsyncSchedule(in_flight, accumulate, "low-staleness")
