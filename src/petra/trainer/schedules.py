"""Chooses the schedule of a method."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

from petra.methods import Method
from petra.schedule import AsyncSchedule, FlushEverySchedule, InterleavedSchedule, PipelineSchedule, find_schedule

IN_FLIGHT = "in-flight"
"""The name of a schedule that was given as the number of micro-batches in flight of each stage."""

SYNCHRONOUS = ("sequential", "gpipe", "1f1b", "interleaved")
ASYNCHRONOUS = ("low-staleness", "lock-step", "locked-forward", "flush", IN_FLIGHT)


def choose_schedule(
    method: Method,
    stages: int,
    accumulate: int,
    schedule: str | Sequence[int] | None = None,
    flush_until: int | None = None,
    ranks: int = 1,
) -> PipelineSchedule:
    """Return the schedule of a method.

    Args:
        method: The method.
        stages: The number of stages.
        accumulate: The number of micro-batches per update.
        schedule: A name for `find_schedule`, or the number in flight of each stage; None for the method's own.
        flush_until: For asynchronous schedules: flush after each of this many first updates.
        ranks: The number of ranks; `interleaved` without a number gives each of them as many stages.

    Returns:
        The schedule.

    Raises:
        ValueError: The method cannot be used with the schedule, or an argument is invalid.
    """
    chosen = _find(method, stages, accumulate, schedule, ranks)
    if schedule is not None and not accepts(method, schedule):
        if not method.schedule(1, 1).exact:
            raise ValueError(
                f"{method.name} has one schedule only: leave schedule out, or choose a pipelined method such as petra"
            )
        raise ValueError(
            f"{method.name} computes exact gradients, but the schedule {chosen.name} changes weights between forward "
            f"and backward: choose gpipe, 1f1b or interleaved, or a method for late gradients such as petra"
        )
    if not flush_until:
        return chosen
    if not method.pipelined:
        raise ValueError(f"flush_until is {flush_until}, but {method.name} is never stale: leave flush_until out")
    if isinstance(chosen, FlushEverySchedule) and not chosen.exact:
        return FlushEverySchedule(chosen.schedule, chosen.every, flush_until)
    if not isinstance(chosen, AsyncSchedule):
        raise ValueError(
            f"flush_until is {flush_until}, but the schedule {chosen.name} "
            f"{'flushes after every update' if chosen.exact else 'cannot be flushed'}: set flush_until to 0, or choose "
            "low-staleness"
        )
    return FlushEverySchedule(chosen, None, flush_until)


def accepts(method: Method, schedule: str | Sequence[int]) -> bool:
    """Return True if a method can be used with a schedule.

    Args:
        method: The method.
        schedule: The name of a schedule, or the number in flight of each stage.

    Returns:
        True for the method's own schedule; for all synchronous schedules if the method computes exact gradients; for
        these and the asynchronous ones if it is pipelined.
    """
    name = schedule.partition(":")[0] if isinstance(schedule, str) else IN_FLIGHT
    if isinstance(schedule, str) and name == "flush" and schedule.partition(":")[2].lstrip("0") in ("", "1"):
        name = "1f1b"
    own = method.schedule(1, 1)
    if name == own.name:
        return True
    return (name in SYNCHRONOUS and (method.pipelined or own.exact)) or (name in ASYNCHRONOUS and method.pipelined)


def _find(
    method: Method, stages: int, accumulate: int, schedule: str | Sequence[int] | None, ranks: int
) -> PipelineSchedule:
    if schedule is None:
        return method.schedule(stages, accumulate)
    if isinstance(schedule, str):
        if schedule == "interleaved" and ranks > 1:
            if stages % ranks:
                raise ValueError(f"{stages} stages cannot be interleaved on {ranks} ranks: give a multiple of {ranks}")
            return InterleavedSchedule(stages, accumulate, stages // ranks)
        if schedule == "interleaved" and stages % 2:  # in one process, any number of stages per rank will do
            return InterleavedSchedule(stages, accumulate, 1)
        return find_schedule(schedule, stages, accumulate)
    if isinstance(schedule, Real):
        raise ValueError(
            f"schedule is {schedule!r}: give a name, or the number in flight of each stage, like [3, 2, 1, 0]"
        )
    if len(schedule) != stages:
        raise ValueError(f"schedule has {len(schedule)} numbers for {stages} stages: give one for each stage")
    return AsyncSchedule(schedule, accumulate, IN_FLIGHT)
