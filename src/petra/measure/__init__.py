"""Instruments that observe an executor: memory."""

from petra.measure.memory import MemoryProbe, StageMemory, at_rest, nbytes

__all__ = ["MemoryProbe", "StageMemory", "at_rest", "nbytes"]
