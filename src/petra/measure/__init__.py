"""Instruments that observe an executor, and where they did."""

from petra.measure.environment import environment
from petra.measure.memory import MemoryProbe, StageMemory, at_rest, nbytes
from petra.measure.timeline import Timeline, Trace

__all__ = ["MemoryProbe", "StageMemory", "Timeline", "Trace", "at_rest", "environment", "nbytes"]
