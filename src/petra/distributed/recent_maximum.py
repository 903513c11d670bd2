"""Numbers that all processes share without waiting for each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from petra.distributed.transport import Transport


class RecentMaximum:
    """Finds the largest of the values of all processes, a few ticks later.

    The values of a tick are read when all processes have contributed to them, so that nobody waits.

    Args:
        transport: Connects the processes.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._pending: deque[Callable[[], list[float]]] = deque()

    def update(self, values: Sequence[int]) -> list[int] | None:
        """Contribute the values of this tick. All processes call this once per tick, with as many values.

        Args:
            values: The values of this process.

        Returns:
            The largest of each value in a recent tick, the same on all processes; None before there is one.
        """
        self._pending.append(self._transport.maximum_async([float(value) for value in values]))
        if len(self._pending) <= self._transport.latency:
            return None
        return [int(value) for value in self._pending.popleft()()]
