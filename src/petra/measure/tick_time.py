"""Predicts how long a tick takes, by simulating the actions of a schedule with given durations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petra.measure.profile import Seconds
from petra.pipeline.message_layout import Template, payload
from petra.schedule import Kind, PipelineSchedule


@dataclass(frozen=True)
class Link:
    """The speed of messages between ranks."""

    latency: float = 0.0
    """Seconds for each message, as measured."""
    bandwidth: float = float("inf")
    """Bytes per second."""
    delay: float = 0.0
    """Seconds for each message, in addition: those of a longer link."""

    def of(self, message: Template) -> float:
        """Return the time of a message.

        Args:
            message: Tensors with the shapes and dtypes of the message.

        Returns:
            Seconds from sending to arrival.
        """
        tensors = [t for t in message if t is not None]
        return self.delay + self.latency + payload(tensors) / self.bandwidth


def tick_seconds(
    schedule: PipelineSchedule,
    placement: Sequence[int],
    stages: Sequence[Seconds],
    forward_messages: Sequence[float] | None = None,
    backward_messages: Sequence[float] | None = None,
) -> float:
    """Return the mean time per micro-batch in steady state.

    Each rank performs its actions in the order of the schedule, each as soon as the rank is free and the message of
    the action has arrived.

    Args:
        schedule: The schedule.
        placement: The rank of each stage.
        stages: The durations of the actions of each stage.
        forward_messages: For each stage but the last, the seconds of a message to the next stage if that is on another
            rank; by default 0.
        backward_messages: The same for messages from the next stage back.

    Returns:
        Seconds per micro-batch.
    """
    forward_messages = forward_messages or [0.0] * (schedule.stages - 1)
    backward_messages = backward_messages or [0.0] * (schedule.stages - 1)
    clock = dict.fromkeys(placement, 0.0)
    arrivals: dict[tuple[int, Kind, int], float] = {}
    ends: list[float] = []
    # A bottleneck that involves all stages takes some rounds to show.
    settled = schedule.accumulate * -(-(4 * schedule.stages + 4 * schedule.staleness(0)) // schedule.accumulate)
    for tick in range(2 * settled):
        for action in (action for phase in schedule.tick(tick, tick + 1) for action in phase):
            stage, kind, m = action.stage, action.kind, action.microbatch
            rank, seconds = placement[stage], stages[stage]
            if kind is Kind.LEARN:
                clock[rank] = max(clock[rank], arrivals.pop((stage, Kind.BACKWARD, m))) + seconds.learn
                continue
            start = max(clock[rank], arrivals.pop((stage, kind, m), 0.0))
            if kind is Kind.FORWARD:
                clock[rank] = start + seconds.forward
                if stage < schedule.stages - 1:
                    delay = forward_messages[stage] if placement[stage + 1] != rank else 0.0
                    arrivals[stage + 1, kind, m] = clock[rank] + delay
            elif kind is Kind.BACKWARD:
                clock[rank] = start + seconds.backward
                if stage > 0:
                    delay = backward_messages[stage - 1] if placement[stage - 1] != rank else 0.0
                    arrivals[stage - 1, kind, m] = clock[rank] + delay
            else:
                clock[rank] = start + seconds.update
        ends.append(max(clock.values()))
    return (ends[-1] - ends[settled - 1]) / settled
