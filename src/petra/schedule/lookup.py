"""All schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from petra.schedule.async_schedule import lock_step, low_staleness
from petra.schedule.flush_schedules import FlushEverySchedule, GPipeSchedule, OneFOneBSchedule
from petra.schedule.interleaved_schedule import InterleavedSchedule
from petra.schedule.locked_schedules import DecoupledSchedule, LockedForwardSchedule, SequentialSchedule
from petra.schedule.pipeline_schedule import PipelineSchedule


def flush_every(stages: int, accumulate: int = 1, every: int = 1) -> FlushEverySchedule:
    """Return the low-staleness schedule with a flush after every n updates: 1 is exact, more is closer to PETRA.

    Args:
        stages: The number of stages, J.
        accumulate: The number of micro-batches per update, k.
        every: The number of updates between two flushes, n.

    Returns:
        The schedule.
    """
    return FlushEverySchedule(low_staleness(stages, accumulate), every)


SCHEDULES: dict[str, Callable[[int, int], PipelineSchedule]] = {
    "low-staleness": low_staleness,
    "lock-step": lock_step,
    "locked-forward": LockedForwardSchedule,
    "flush": flush_every,
    "interleaved": InterleavedSchedule,
    **{kind.name: kind for kind in (SequentialSchedule, GPipeSchedule, OneFOneBSchedule, DecoupledSchedule)},
}
"""All schedules by name, as functions of the number of stages and of the micro-batches per update."""

WITH_NUMBER: dict[str, Callable[[int, int, int], PipelineSchedule]] = {
    "flush": flush_every,
    "interleaved": InterleavedSchedule,
}
"""The schedules whose name may be followed by a colon and a number: updates between flushes, or stages per rank."""


def find_schedule(text: str, stages: int, accumulate: int = 1) -> PipelineSchedule:
    """Create a schedule from its name.

    Args:
        text: A key of `SCHEDULES`; `flush:N` flushes after every N updates, `interleaved:V` has V stages per rank.
        stages: The number of stages, J.
        accumulate: The number of micro-batches per update, k.

    Returns:
        The schedule.

    Raises:
        ValueError: There is no such schedule, or its number is invalid.
    """
    name, colon, number = text.partition(":")
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(SCHEDULES)}"
        raise ValueError(f"there is no schedule named {name!r}: {hint}")
    if not colon:
        return SCHEDULES[name](stages, accumulate)
    if name not in WITH_NUMBER or not (number.isascii() and number.isdecimal()):
        example = f"{name}:4" if name in WITH_NUMBER else name
        raise ValueError(f"schedule is {text!r}: write it like {example}")
    return WITH_NUMBER[name](stages, accumulate, int(number))
