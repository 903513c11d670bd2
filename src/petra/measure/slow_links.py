"""Pipelines over slow links: their speed, and the numbers of micro-batches in flight that hide the time of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf

from petra.schedule import AsyncSchedule, least_in_flight

THROUGHPUT_SHARE = 0.95
"""The share of the throughput without waiting for messages that `PipelineOverLinks.least_in_flight` keeps."""


@dataclass(frozen=True)
class PipelineOverLinks:
    """The stages of a pipeline with an asynchronous schedule, and the links between its ranks.

    With gloo, the receiver announces each receive, and the sender waits for the announcement. A rank announces all
    receives of a tick when the tick begins. So a message arrives one latency after it was sent, and no earlier than two
    latencies and its time on the link after its announcement.

    If the stages of a rank are not consecutive, the time of each is taken to be that of all stages of the rank.
    """

    seconds: Sequence[float]
    """The time per micro-batch of each stage: forward, backward, and its part of an update."""
    placement: Sequence[int]
    """The rank of each stage."""
    up_bytes: Sequence[float]
    """The bytes of a message from each stage to the next."""
    down_bytes: Sequence[float]
    """The bytes of a message to each stage from the next."""
    latency: float
    """Seconds from the end of sending to the arrival."""
    bandwidth: float = inf
    """Bytes per second of a link, in each direction."""

    @property
    def limit(self) -> float:
        """The smallest possible seconds per micro-batch: the time of the busiest rank or link."""
        return max([*self._rank_seconds, *self._up, *self._down])

    @property
    def compute_limit(self) -> float:
        """The smallest possible seconds per micro-batch if messages took no time."""
        return max(self._rank_seconds)

    def least_in_flight(self, keep: float = THROUGHPUT_SHARE) -> list[int]:
        """Return the smallest numbers in flight that keep a share of the largest possible throughput over these links.

        Args:
            keep: The share.

        Returns:
            The number of each stage, for `AsyncSchedule`.
        """
        period = self.limit / keep
        least = [1] * (len(self._groups) - 1)
        for boundary in range(len(least)):
            while self._announcement_period(boundary, least[boundary]) > period * (1 + 1e-9):
                least[boundary] += 1
        groups = least_in_flight(self._work, self._round_trips, period, least)
        in_flight: list[int] = []
        extra = 0  # stages of the same rank differ by 1
        for number, stages in reversed(list(zip(groups, self._groups, strict=True))):
            in_flight = [*(number + extra + above for above in reversed(range(len(stages)))), *in_flight]
            extra += len(stages) - 1
        return in_flight

    def period(self, in_flight: Sequence[int]) -> float:
        """Return the seconds per micro-batch in the steady state.

        Args:
            in_flight: The number of micro-batches in flight of each stage.

        Returns:
            The seconds, exact for one stage per rank. `least_in_flight` derives the conditions.
        """
        first = [in_flight[stages[0]] for stages in self._groups]
        last = [in_flight[stages[-1]] for stages in self._groups]
        period = self.limit
        for low in range(len(self._work)):
            path = self._work[low]
            inner = 0
            for high in range(low + 1, len(self._work)):
                path += self._round_trips[high - 1] + self._work[high]
                period = max(period, path / (last[low] - first[high] - inner + 1))
                inner += first[high] - last[high]
            if low + 1 < len(self._work):
                period = max(period, self._announcement_period(low, last[low] - first[low + 1]))
        return period

    def throughput(self, schedule: AsyncSchedule) -> float:
        """Return the throughput with a schedule, relative to that if messages took no time.

        Args:
            schedule: The schedule.

        Returns:
            The share, at most 1.
        """
        return self.compute_limit / self.period(schedule.in_flight)

    def _announcement_period(self, boundary: int, apart: int) -> float:
        """Return the shortest period at which messages arrive in time, if they are announced at the start of a tick.

        If the numbers in flight of two stages differ by n, the next stage uses a message ⌊n/2⌋ ticks after the one in
        which it was sent, and the stage before uses the message back after ⌈n/2⌉ ticks.
        """
        forward = (self._work[boundary + 1] + 2 * self.latency + self._up[boundary]) / (apart // 2 + 1)
        backward = (self._work[boundary] + 2 * self.latency + self._down[boundary]) / (-(-apart // 2) + 1)
        return max(forward, backward)

    @property
    def _groups(self) -> list[list[int]]:
        """The stages of each group of consecutive stages on the same rank."""
        return [list(stages) for _, stages in groupby(range(len(self.placement)), lambda s: self.placement[s])]

    @property
    def _rank_seconds(self) -> list[float]:
        found = [0.0] * (max(self.placement) + 1)
        for rank, seconds in zip(self.placement, self.seconds, strict=True):
            found[rank] += seconds
        return found

    @property
    def _work(self) -> list[float]:
        """The time per micro-batch of the rank of each group."""
        return [self._rank_seconds[self.placement[stages[0]]] for stages in self._groups]

    @property
    def _up(self) -> list[float]:
        """The seconds that a message to the next group occupies its link."""
        return [self.up_bytes[stages[-1]] / self.bandwidth for stages in self._groups[:-1]]

    @property
    def _down(self) -> list[float]:
        return [self.down_bytes[stages[-1]] / self.bandwidth for stages in self._groups[:-1]]

    @property
    def _round_trips(self) -> list[float]:
        return [2 * self.latency + up + down for up, down in zip(self._up, self._down, strict=True)]
