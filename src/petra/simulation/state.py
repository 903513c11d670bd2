"""The times of all workers in a simulation, and how the steps of a cycle change them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from petra.simulation.costs import Cluster, LinkSpeed, StageCosts
from petra.simulation.cycle import WEIGHT, Array, Cycle, Step
from petra.simulation.trace import Trace

_POOL = 2**20
"""How many random factors are drawn; each step uses a random stretch of them."""
Index = slice | Array


class State:
    """The times of all workers and messages. The last axis of arrays is the replica.

    At first all workers are free, and the messages of earlier cycles have arrived.

    Args:
        cycle: What the workers do.
        costs: The costs of each stage.
        cluster: The links, and how the speeds of workers differ.
        simulated: The number of replicas that are simulated.
        replicas: The number of replicas there are.
        seed: Decides which workers are stragglers, and the jitter.
    """

    def __init__(
        self, cycle: Cycle, costs: Sequence[StageCosts], cluster: Cluster, simulated: int, replicas: int, seed: int
    ) -> None:
        self.cycle = cycle
        self.clock = np.zeros((cycle.workers, simulated))
        """When each worker is free."""
        self.busy = np.zeros_like(self.clock)
        """Seconds for which each worker has computed."""
        self.averaging = np.zeros_like(self.clock)
        """Seconds for which each worker has averaged gradients."""
        self._overlap = cluster.overlap
        self._random = np.random.default_rng(seed)
        slow = self._random.random(self.clock.shape) < cluster.stragglers
        speed = np.where(slow, cluster.slowdown, 1.0)
        self._factors = None
        if cluster.jitter:
            spread = np.log1p(cluster.jitter**2)
            normal = self._random.standard_normal(max(_POOL, 2 * self.clock.size))
            self._factors = np.exp(np.sqrt(spread) * normal - spread / 2)  # their mean is 1
        numbers = dict[tuple[int, int], int]()
        links = {
            "F": _Links.of(cycle, cluster, [c.forward_bytes for c in costs], 1, numbers),
            "B": _Links.of(cycle, cluster, [c.backward_bytes for c in costs], -1, numbers),
        }
        self._free = np.zeros((len(numbers), simulated))  # when each link is free
        waiting = (cycle.stages + 1, cycle.depth, simulated)
        self._arrival = {"F": np.zeros(waiting), "B": np.zeros(waiting)}  # by stage and micro-batch
        reduction = np.array([cluster.averaging_seconds(c.gradient_bytes, replicas) for c in costs])[:, None]
        seconds = _seconds(cycle, costs)
        for kind, uses in (("F", "F"), ("B", cycle.gradient_kind)):
            seconds[kind] = seconds[kind] + links[kind].sending
            seconds[uses] = seconds[uses] + links[kind].receiving
        self._steps = [
            _PreparedStep.of(
                step, cycle, links.get(step.kind), seconds[step.kind], speed, reduction if replicas > 1 else None
            )
            for step in cycle.steps
        ]

    def run(self, number: int, trace: Trace | None) -> None:
        """Run a cycle.

        Args:
            number: The number of cycles before it.
            trace: Records the operations of the first replica.
        """
        first = number * self.cycle.microbatches
        for index, step in enumerate(self._steps):
            start, end, left = self._perform(step, first)
            if trace is not None:
                trace.add(index, step.microbatches + first, start[:, 0], end[:, 0], left[:, 0])

    def _perform(self, step: _PreparedStep, first: int) -> tuple[Array, Array, Array]:
        """Perform the operations of a step. Return when they begin and end, and when their messages have left."""
        slots: int | Array = 0 if self.cycle.depth == 1 else (step.microbatches + first) % self.cycle.depth
        if step.uses is None:
            start = self.clock[step.workers].copy()  # with a slice, it would change below
        else:
            start = np.maximum(self.clock[step.workers], self._arrival[step.uses][step.stages, slots])
        duration = step.duration
        if self._factors is not None:
            begin = self._random.integers(len(self._factors) - duration.size)
            duration = duration * self._factors[begin : begin + duration.size].reshape(duration.shape)
        if step.reduction is not None:  # an update begins with the average, which waits for all replicas
            self.averaging[step.workers] += step.reduction
            end = start.max(axis=1, keepdims=True) + step.reduction + duration
        else:
            end = start + duration
        self.busy[step.workers] += duration
        left = end
        if step.links is not None:
            if step.occupied is None:  # messages leave at once
                arrived = end if step.latency is None else end + step.latency
            else:
                assert step.latency is not None
                left = np.maximum(end, self._free[step.links]) + step.occupied
                self._free[step.links] = left
                arrived = left + step.latency
            self._arrival[step.kind][step.receivers, slots] = arrived
        self.clock[step.workers] = end if self._overlap else left
        return start, end, left

    def snapshot(self, number: int) -> Snapshot:
        """Return all times on which later ones depend.

        Args:
            number: The last cycle.

        Returns:
            The times, with those of messages in the order of their micro-batches.
        """
        shift = -((number + 1) * self.cycle.microbatches) % self.cycle.depth
        forward, backward = self._arrival["F"][1:-1], self._arrival["B"][:-2]
        messages = (np.roll(waiting, shift, axis=1).ravel() for waiting in (forward, backward))
        return Snapshot(np.concatenate([self.clock.ravel(), *messages, self._free.ravel()]), self.clock.size)


@dataclass(frozen=True)
class Snapshot:
    """All times at the end of a cycle."""

    times: Array
    """The times, those of workers first."""
    workers: int
    """The number of times of workers."""

    def repeats(self, earlier: Snapshot) -> bool:
        """Return True if all times have increased by the same amount.

        Args:
            earlier: The times at the end of an earlier cycle.

        Returns:
            True if times that were not 0 for lack of messages differ from the earlier ones by one number.
        """
        change = self.times - earlier.times
        increase = change[0]
        tolerance = 1e-9 * max(abs(increase), 1e-300)
        if not np.all(np.abs(change[: self.workers] - increase) <= tolerance):
            return False
        # Times of links without messages, and of messages that were never sent, stay 0.
        return bool(np.all((np.abs(change - increase) <= tolerance) | (self.times == 0)))


@dataclass(frozen=True)
class _PreparedStep:
    """A step with everything that does not change from cycle to cycle."""

    kind: str
    stages: Index
    workers: Index
    receivers: Index
    microbatches: Array
    uses: str | None
    """The kind of message that the operations wait for."""
    duration: Array
    reduction: Array | None
    links: Index | None
    occupied: Array | None
    latency: Array | None

    @classmethod
    def of(
        cls, step: Step, cycle: Cycle, links: _Links | None, seconds: Array, speed: Array, reduction: Array | None
    ) -> _PreparedStep:
        stages = step.stages
        busy = links is not None and bool(links.occupied.any())
        waits = links is not None and bool(links.latency.any())
        # What the first stage sends back and the last one sends on goes to the last row, where no stage waits.
        receivers = stages + 1 if step.kind == "F" else (stages - 1) % (cycle.stages + 1)
        return cls(
            kind=step.kind,
            stages=_index(stages) if cycle.depth == 1 else stages,
            workers=_index(step.workers),
            receivers=_index(receivers) if cycle.depth == 1 else receivers,
            microbatches=step.microbatches,
            uses="F" if step.kind == "F" else "B" if step.kind == cycle.gradient_kind else None,
            duration=seconds[stages] * speed[step.workers],
            reduction=reduction[stages] if step.kind == "U" and reduction is not None else None,
            links=None if links is None else _index(links.number[stages]),
            occupied=links.occupied[stages] if links is not None and busy else None,
            latency=links.latency[stages] if links is not None and (busy or waits) else None,
        )


@dataclass(frozen=True)
class _Links:
    """The links of one direction, by the stage that sends. A message to the same worker takes no time."""

    number: Array
    occupied: Array
    """Seconds that a message occupies its link."""
    latency: Array
    sending: Array
    """Seconds for which sending a message occupies the worker of a stage."""
    receiving: Array
    """Seconds for which receiving one of this direction occupies it."""

    @classmethod
    def of(
        cls,
        cycle: Cycle,
        cluster: Cluster,
        sizes: Sequence[float],
        direction: int,
        numbers: dict[tuple[int, int], int],
    ) -> _Links:
        placement, stages = cycle.placement, cycle.stages
        number: list[int] = []
        occupied: list[float] = []
        latency: list[float] = []
        sending, receiving = [0.0] * stages, [0.0] * stages
        for stage in range(stages):
            to = stage + direction
            local = not 0 <= to < stages or placement[to] == placement[stage]
            speed = LinkSpeed() if local else cluster.between(placement[stage], placement[to])
            pair = (-1 - stage, direction) if local else (placement[stage], placement[to])
            number.append(numbers.setdefault(pair, len(numbers)))
            occupied.append(0.0 if local else sizes[stage] / speed.bandwidth)
            latency.append(speed.latency)
            if not local:
                sending[stage] = receiving[to] = cluster.overhead
        columns = (np.array(values)[:, None] for values in (occupied, latency, sending, receiving))
        return cls(np.array(number), *columns)


def _seconds(cycle: Cycle, costs: Sequence[StageCosts]) -> dict[str, Array]:
    """Return for each kind of operation the seconds on each stage."""
    split = WEIGHT in cycle.kinds
    seconds = {
        "F": [c.forward for c in costs],
        "B": [c.backward - c.weight if split else c.backward for c in costs],
        WEIGHT: [c.weight for c in costs],
        "U": [c.update for c in costs],
        "L": [c.learn for c in costs],
    }
    return {kind: np.array(values)[:, None] for kind, values in seconds.items()}


def _index(values: Array) -> Index:
    """Return evenly spaced numbers as a slice, which selects rows without copying them."""
    steps = np.diff(values)
    if len(values) == 1:
        return slice(int(values[0]), int(values[0]) + 1)
    if steps[0] > 0 and (steps == steps[0]).all():
        return slice(int(values[0]), int(values[-1]) + 1, int(steps[0]))
    return values
