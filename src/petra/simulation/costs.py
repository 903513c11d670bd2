"""The inputs of a simulation: the costs of stages, and the cluster of workers that runs them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite


@dataclass(frozen=True)
class StageCosts:
    """The seconds and bytes of one stage, for one micro-batch unless said otherwise."""

    forward: float = 1.0
    """Seconds of a forward; on the last stage with the loss."""
    backward: float = 2.0
    """Seconds of a backward, with reconstruction or recomputation if the method needs them."""
    weight: float = 0.0
    """The part of `backward` that computes gradients of parameters, for schedules that postpone it (ZBV)."""
    update: float = 0.0
    """Seconds of an update, without averaging over replicas."""
    learn: float = 0.0
    """Seconds of a training step of the synthesizer (DNI)."""
    forward_bytes: float = 0.0
    """The message to the next stage."""
    backward_bytes: float = 0.0
    """The message to the previous stage."""
    gradient_bytes: float = 0.0
    """The bytes that replicas average at an update."""
    resident_bytes: float = 0.0
    """Weights, their gradients and the state of the optimizer."""
    saved_bytes: float = 0.0
    """The bytes saved between forward and backward."""
    working_bytes: float = 0.0
    """The additional bytes that a backward needs while it runs."""

    def slower(self, factor: float) -> StageCosts:
        """Return the costs if all actions take longer.

        Args:
            factor: Multiplies all seconds.

        Returns:
            The costs.
        """
        names = ("forward", "backward", "weight", "update", "learn")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of messages in one direction between two workers."""

    latency: float = 0.0
    """Seconds from the end of sending to the arrival."""
    bandwidth: float = inf
    """Bytes per second."""

    def __post_init__(self) -> None:
        if not (isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"latency is {self.latency}: give seconds, 0 or more")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth is {self.bandwidth}: give bytes per second, more than 0")


@dataclass(frozen=True)
class Cluster:
    """The links between workers, and how their speeds differ.

    Worker w of every pipeline is on node w // `node_size` of this pipeline. Replicas are on different nodes if there
    are nodes.

    Raises:
        ValueError: A value is out of range.
    """

    link: LinkSpeed = LinkSpeed()
    """Between workers of the same node."""
    network: LinkSpeed | None = None
    """Between nodes; None if it is the same as `link`."""
    node_size: int | None = None
    """Workers per node; None if all are on one node."""
    overlap: bool = True
    """A worker computes while it sends. Otherwise it waits until the message has left."""
    overhead: float = 0.0
    """Seconds for which each message occupies the worker that sends it, and the worker that receives it."""
    jitter: float = 0.0
    """Standard deviation of the duration of an action, divided by its mean. Durations are log-normal."""
    stragglers: float = 0.0
    """The share of workers that are slower than the others, chosen at random."""
    slowdown: float = 1.0
    """The factor by which they are slower."""

    def __post_init__(self) -> None:
        if self.node_size is not None and self.node_size < 1:
            raise ValueError(f"node_size is {self.node_size}: give the workers of a node, 1 or more")
        for name in ("overhead", "jitter"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: give a number, 0 or more")
        if not 0 <= self.stragglers <= 1:
            raise ValueError(f"stragglers is {self.stragglers}: give a share of the workers between 0 and 1")
        if not (isfinite(self.slowdown) and self.slowdown > 0):
            raise ValueError(f"slowdown is {self.slowdown}: give a factor above 0, such as 1.5")

    @property
    def uneven(self) -> bool:
        """True if workers with the same costs take different times."""
        return self.jitter > 0 or (self.stragglers > 0 and self.slowdown != 1)

    def between(self, sender: int, receiver: int) -> LinkSpeed:
        """Return the link between two workers of a pipeline.

        Args:
            sender: One worker.
            receiver: The other one.

        Returns:
            The link in this direction.
        """
        if self.network is None or self.node_size is None or sender // self.node_size == receiver // self.node_size:
            return self.link
        return self.network

    def averaging_seconds(self, size: float, replicas: int) -> float:
        """Return the time of a ring all-reduce of gradients.

        Args:
            size: The bytes of the gradients.
            replicas: The number of replicas.

        Returns:
            Seconds, from when the last replica is ready.
        """
        link = self.network if self.network is not None and self.node_size is not None else self.link
        return 2 * (replicas - 1) * (link.latency + size / replicas / link.bandwidth)
