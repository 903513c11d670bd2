"""Instruments that observe an executor, and where they did; and a plan from what they found."""

from petra.measure.activations import Activations
from petra.measure.environment import environment
from petra.measure.fidelity import Fidelity, Measurement
from petra.measure.forecast import Forecast
from petra.measure.likeness import Likeness
from petra.measure.memory import MemoryProbe, StageMemory, at_rest, nbytes
from petra.measure.plan import Plan, make_plan
from petra.measure.profile import Profile, Seconds, Stopwatch, profile
from petra.measure.ticks import Link, tick_seconds
from petra.measure.timeline import Timeline, Trace

__all__ = [
    "Activations",
    "Fidelity",
    "Forecast",
    "Likeness",
    "Link",
    "Measurement",
    "MemoryProbe",
    "Plan",
    "Profile",
    "Seconds",
    "StageMemory",
    "Stopwatch",
    "Timeline",
    "Trace",
    "at_rest",
    "environment",
    "make_plan",
    "nbytes",
    "profile",
    "tick_seconds",
]
