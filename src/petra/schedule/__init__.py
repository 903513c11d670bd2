"""Pipeline schedules as data: which stage does what, for which micro-batch, in which tick. Imports no PyTorch.

Start with `action.py` (one action of one stage) and `pipeline_schedule.py` (the base class: from a tick to its
actions). The schedules are in

- `async_schedule.py`: PETRA's `lock_step` and `low_staleness`, with stale gradients;
- `locked_schedules.py`: sequential backprop, Features Replay and DNI;
- `flush_schedules.py`: GPipe, 1F1B, and a flush after every n updates;
- `interleaved_schedule.py`: 1F1B with several stages per rank.

`lookup.py` has all of them by name. `table.py` writes a schedule out for a number of micro-batches, `layout.py`
arranges programs in time and detects deadlocks, `verify.py` checks a table, and `draw.py` and `svg.py` draw it as text
and as a picture.
"""

from petra.schedule.action import Action, Kind
from petra.schedule.async_schedule import AsyncSchedule, least_in_flight, lock_step, low_staleness
from petra.schedule.draw import draw
from petra.schedule.flush_schedules import FlushEverySchedule, FlushSchedule, GPipeSchedule, OneFOneBSchedule
from petra.schedule.interleaved_schedule import InterleavedSchedule
from petra.schedule.layout import Deadlock, lay_out
from petra.schedule.locked_schedules import DecoupledSchedule, LockedForwardSchedule, SequentialSchedule
from petra.schedule.lookup import SCHEDULES, find_schedule, flush_every
from petra.schedule.pipeline_schedule import Phase, PipelineSchedule, Tick
from petra.schedule.svg import draw_svg
from petra.schedule.table import ScheduleTable
from petra.schedule.verify import ScheduleError, check_schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "AsyncSchedule",
    "Deadlock",
    "DecoupledSchedule",
    "FlushEverySchedule",
    "FlushSchedule",
    "GPipeSchedule",
    "InterleavedSchedule",
    "Kind",
    "LockedForwardSchedule",
    "OneFOneBSchedule",
    "Phase",
    "PipelineSchedule",
    "ScheduleError",
    "ScheduleTable",
    "SequentialSchedule",
    "Tick",
    "check_schedule",
    "draw",
    "draw_svg",
    "find_schedule",
    "flush_every",
    "lay_out",
    "least_in_flight",
    "lock_step",
    "low_staleness",
]
