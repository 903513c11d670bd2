"""Chooses the schedule of a method."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

from petra.formatting import unknown
from petra.methods import Method
from petra.schedule import SCHEDULES, AsyncSchedule, PipelineSchedule

PIPELINED_SCHEDULES = ("low-staleness", "lock-step", "locked-forward")
"""The names in `SCHEDULES` that pipelined methods accept; each of the other schedules belongs to one method."""


def choose_schedule(
    method: Method, stages: int, accumulate: int, schedule: str | Sequence[int] | None
) -> PipelineSchedule:
    """Return the schedule of a method: its own, or for pipelined methods the one that is given."""
    if schedule is None:
        return method.schedule(stages, accumulate)
    if not method.pipelined:
        raise ValueError(
            f"{method.name} has one schedule only: leave schedule out, or choose a pipelined method such as petra"
        )
    if isinstance(schedule, str):
        if schedule not in PIPELINED_SCHEDULES:
            raise unknown("schedule", schedule, PIPELINED_SCHEDULES)
        return SCHEDULES[schedule](stages, accumulate)
    if isinstance(schedule, Real):
        raise ValueError(
            f"schedule is {schedule!r}: give a name, or the number in flight of each stage, like [3, 2, 1, 0]"
        )
    if len(schedule) != stages:
        raise ValueError(f"schedule has {len(schedule)} numbers for {stages} stages: give one for each stage")
    return AsyncSchedule(schedule, accumulate, "in-flight")
