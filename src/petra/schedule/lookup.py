"""All schedules by name."""

from __future__ import annotations

from collections.abc import Callable

from petra.schedule.async_schedule import lock_step, low_staleness
from petra.schedule.flush_schedules import GPipeSchedule, OneFOneBSchedule
from petra.schedule.locked_schedules import DecoupledSchedule, LockedForwardSchedule, SequentialSchedule
from petra.schedule.pipeline_schedule import PipelineSchedule

SCHEDULES: dict[str, Callable[[int, int], PipelineSchedule]] = {
    "low-staleness": low_staleness,
    "lock-step": lock_step,
    "locked-forward": LockedForwardSchedule,
    **{kind.name: kind for kind in (SequentialSchedule, GPipeSchedule, OneFOneBSchedule, DecoupledSchedule)},
}
"""All schedules by name, as functions of the number of stages and of the micro-batches per update."""
