"""Schedules as data: what each stage does in which tick. Knows nothing of tensors."""

from petra.schedule.action import Action, Kind
from petra.schedule.check import ScheduleError, check
from petra.schedule.draw import draw
from petra.schedule.layout import Deadlock, lay_out
from petra.schedule.order import (
    Decoupled,
    Flush,
    GPipe,
    LockedForward,
    OneForwardOneBackward,
    Order,
    Phase,
    Pipelined,
    Sequential,
    Tick,
    lock_step,
    low_staleness,
)
from petra.schedule.schedule import Schedule

__all__ = [
    "Action",
    "Deadlock",
    "Decoupled",
    "Flush",
    "GPipe",
    "Kind",
    "LockedForward",
    "OneForwardOneBackward",
    "Order",
    "Phase",
    "Pipelined",
    "Schedule",
    "ScheduleError",
    "Sequential",
    "Tick",
    "check",
    "draw",
    "lay_out",
    "lock_step",
    "low_staleness",
]
