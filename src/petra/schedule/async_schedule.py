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
    """Return the schedule with the least staleness that keeps every stage busy: n_s = (J-1-s) ceil(1 + 2c/T).

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
    in_flight = least_in_flight([1.0] * stages, [2 * latency] * (stages - 1), 1.0)
    return AsyncSchedule(in_flight, accumulate, "low-staleness")


def least_in_flight(
    seconds: Sequence[float], round_trips: Sequence[float], period: float, least: Sequence[int] | None = None
) -> list[int]:
    """Return the smallest numbers in flight with which a pipeline finishes a micro-batch per period.

    In each period, stage s performs the forward of a micro-batch m + n_s and then the backward of m. Consider a later
    stage t. It performs the forward of m + n_t before the backward of m. Stage s performs the forward of m + n_t in
    period m + n_t - n_s, counted like the micro-batches of its backwards, and the backward of m in period m: together,
    these are n_s - n_t + 1 periods. In them, the stages s to t each perform a forward and a backward, and a message
    crosses each boundary in both directions. So for all s < t

        (n_s - n_t + 1) period >= T_s + ... + T_t + r_s + ... + r_{t-1}

    There are no other conditions, because every cycle of operations that wait for each other goes from one stage s to
    one stage t and back. The smallest numbers follow from the last stage, which has none in flight, to the first.

    Args:
        seconds: The time of a forward, a backward and an update of each stage, T_s. At most `period`.
        round_trips: For each boundary, the time of a message to the next stage and of one back, r_s.
        period: The time from one micro-batch to the next; `max(seconds)` keeps the slowest stage busy.
        least: The smallest n_s - n_{s+1} for each boundary; by default 1.

    Returns:
        The number n_s for each stage.

    Raises:
        ValueError: A time is negative or infinite, `period` is too short for a stage, or the lengths do not match.
    """
    boundaries = len(seconds) - 1
    least = [1] * boundaries if least is None else least
    if not len(round_trips) == len(least) == boundaries:
        raise ValueError(
            f"there are {len(round_trips)} round trips for {boundaries} boundaries between {len(seconds)} stages: "
            "give one for each"
        )
    for name, times in (("seconds", seconds), ("round_trips", round_trips)):
        if not all(0 <= time < inf for time in times):
            raise ValueError(f"{name} is {list(times)}: give finite times, 0 or more")
    if not max(seconds) <= period < inf:
        raise ValueError(f"period is {period}, but a stage takes {max(seconds)}: give at least as much")
    in_flight = [0] * len(seconds)
    for stage in reversed(range(boundaries)):
        needed, path = in_flight[stage + 1] + least[stage], seconds[stage]
        for later in range(stage + 1, len(seconds)):
            path += round_trips[later - 1] + seconds[later]
            # The small term absorbs floating-point errors, which would round up to one more in flight.
            rounds = ceil(path / period - 1e-9) if path else 1
            needed = max(needed, in_flight[later] + rounds - 1)
        in_flight[stage] = needed
    return in_flight
