"""How long a tick takes, played through on paper: the order's actions with given seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petra.execution.envelope import Template, payload
from petra.measure.profile import Seconds
from petra.schedule import Kind, Order


@dataclass(frozen=True)
class Link:
    """Messages between ranks: seconds for each tensor, and bytes a second."""

    latency: float = 0.0
    bandwidth: float = float("inf")

    def of(self, message: Template) -> float:
        """Seconds until a message has arrived."""
        tensors = [t for t in message if t is not None]
        return len(tensors) * self.latency + payload(tensors) / self.bandwidth


def tick_seconds(
    order: Order,
    placement: Sequence[int],
    stages: Sequence[Seconds],
    ups: Sequence[float] | None = None,
    downs: Sequence[float] | None = None,
) -> float:
    """Mean seconds per micro-batch in steady state.

    ``placement`` are the ranks of the stages; ``ups`` and ``downs`` the seconds that a message takes from each
    stage to the one above, and back, if that is on another rank. Each rank does its actions in the order of the
    schedule, each as soon as the rank is free and the message is there.
    """
    ups = ups or [0.0] * (order.stages - 1)
    downs = downs or [0.0] * (order.stages - 1)
    clock = dict.fromkeys(placement, 0.0)
    arrivals: dict[tuple[int, Kind, int], float] = {}
    ends: list[float] = []
    # A slow way round through all stages needs some rounds to show.
    settled = order.accumulate * -(-(4 * order.stages + 4 * order.staleness(0)) // order.accumulate)
    for tick in range(2 * settled):
        for action in (action for phase in order.tick(tick, tick + 1) for action in phase):
            stage, kind, m = action.stage, action.kind, action.microbatch
            rank, seconds = placement[stage], stages[stage]
            if kind is Kind.LEARN:
                clock[rank] = max(clock[rank], arrivals.pop((stage, Kind.BACKWARD, m))) + seconds.learn
                continue
            start = max(clock[rank], arrivals.pop((stage, kind, m), 0.0))
            if kind is Kind.FORWARD:
                clock[rank] = start + seconds.forward
                if stage < order.stages - 1:
                    way = ups[stage] if placement[stage + 1] != rank else 0.0
                    arrivals[stage + 1, kind, m] = clock[rank] + way
            elif kind is Kind.BACKWARD:
                clock[rank] = start + seconds.backward
                if stage > 0:
                    way = downs[stage - 1] if placement[stage - 1] != rank else 0.0
                    arrivals[stage - 1, kind, m] = clock[rank] + way
            else:
                clock[rank] = start + seconds.update
        ends.append(max(clock.values()))
    return (ends[-1] - ends[settled - 1]) / settled
