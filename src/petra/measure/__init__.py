"""Instruments that observe an executor, and where they did."""

from petra.measure.environment import environment
from petra.measure.memory import MemoryProbe, StageMemory, at_rest, nbytes

__all__ = ["MemoryProbe", "StageMemory", "at_rest", "environment", "nbytes"]
