"""The result of a simulation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from petra.simulation.costs import StageCosts
from petra.simulation.cycle import Array, Cycle
from petra.simulation.trace import Trace


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation, in the steady state."""

    cycle: Cycle
    """The schedule."""
    costs: tuple[StageCosts, ...]
    """The costs of each stage."""
    replicas: int
    """The number of pipelines."""
    seconds_per_update: float
    """The time from one update to the next."""
    busy: Array
    """The share of time in which each worker of a pipeline computes, averaged over replicas."""
    averaging: Array
    """The share of time in which it averages gradients, without waiting for other replicas."""
    trace: Trace
    """The last cycles of the first replica."""

    @property
    def microbatches_per_update(self) -> int:
        """The number of micro-batches of an update of one pipeline."""
        return self.cycle.microbatches // self.cycle.updates

    @property
    def microbatches_per_second(self) -> float:
        """Throughput of all replicas."""
        return self.replicas * self.microbatches_per_update / self.seconds_per_update

    @property
    def idle(self) -> Array:
        """The share of time in which each worker waits: for messages, in a bubble, or for other replicas."""
        return 1 - self.busy - self.averaging

    @property
    def bubble(self) -> float:
        """The mean idle share of all workers."""
        return float(self.idle.mean())

    @property
    def limiting_worker(self) -> int:
        """The worker that has the least idle time."""
        return int(self.idle.argmin())

    @cached_property
    def peak_memory(self) -> Array:
        """Peak bytes of each worker."""
        return self.trace.peaks()

    def to_json(self) -> dict[str, Any]:
        """Convert the figures to plain values.

        Returns:
            A dictionary for `json.dumps`.
        """
        return {
            "schedule": self.cycle.name,
            "workers": self.cycle.workers,
            "stages": self.cycle.stages,
            "replicas": self.replicas,
            "microbatches_per_update": self.microbatches_per_update,
            "seconds_per_update": self.seconds_per_update,
            "microbatches_per_second": self.microbatches_per_second,
            "bubble": self.bubble,
            "idle": self.idle.tolist(),
            "averaging": self.averaging.tolist(),
            "peak_memory": self.peak_memory.tolist(),
            "limiting_worker": self.limiting_worker,
        }
