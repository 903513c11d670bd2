"""Finds the fastest partition of a network whose ranks stay within a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from petra.formatting import mebibytes
from petra.measure.stage_memory import StageMemory
from petra.pipeline import PartitionDoesNotFit, balance


class PartitionSearch:
    """Finds the fastest segment of layers for each rank within the memory limit.

    An estimate of memory takes far longer than a partition. So memory is only estimated for the segments that are
    chosen, and the choice is repeated without those that turn out too large.

    Args:
        layers: The number of layers.
        sizes: The number of stages of each rank.
        seconds: The time of stages, given the layers of each.
        memory_of: The memory of the stages of a rank, given their layers.
        limit: The largest number of bytes of a rank.
    """

    def __init__(
        self,
        layers: int,
        sizes: list[int],
        seconds: Callable[[Sequence[range]], float],
        memory_of: Callable[[int, tuple[range, ...]], list[StageMemory]],
        limit: int | None,
    ) -> None:
        self._layers, self._sizes, self._seconds, self._memory_of, self._limit = (
            layers,
            sizes,
            seconds,
            memory_of,
            limit,
        )
        self._too_large: set[tuple[int, range]] = set()
        self._too_large_from: dict[tuple[int, int], int] = {}  # rank, first layer -> the least end that is too large
        self._cuts: dict[tuple[int, range], tuple[range, ...]] = {}

    def best(self) -> list[tuple[range, ...]]:
        """Return the layers of each stage, for each rank; raise `ValueError` if nothing fits."""
        segments = self._choose()
        fastest: int | None = None
        while self._limit is not None:
            rows = [self._memory_of(rank, self._stages(rank, segment)) for rank, segment in enumerate(segments)]
            fastest = fastest or max(map(total_bytes, rows))
            if max(map(total_bytes, rows)) <= self._limit:
                break
            for rank, segment in enumerate(segments):
                self._exclude(rank, segment, rows[rank], self._limit)
            try:
                segments = self._choose()
            except PartitionDoesNotFit as error:
                raise ValueError(
                    f"rank {error.part} cannot hold {error.layers} within {mebibytes(self._limit)} per rank "
                    f"(the fastest partition needs {mebibytes(fastest)}): raise the limit, use more ranks or use "
                    "smaller micro-batches"
                ) from None
        return [self._stages(rank, segment) for rank, segment in enumerate(segments)]

    def _choose(self) -> list[range]:
        """Return the fastest segment of each rank among those that are not excluded."""
        return balance(
            self._layers,
            len(self._sizes),
            lambda rank, segment: self._seconds(self._stages(rank, segment)),
            lambda rank, segment: (
                len(segment) >= self._sizes[rank]
                and (rank, segment) not in self._too_large
                and segment.stop < self._too_large_from.get((rank, segment.start), self._layers + 1)
            ),
        )

    def _stages(self, rank: int, segment: range) -> tuple[range, ...]:
        """Cut the segment of a rank into its stages."""
        if (rank, segment) not in self._cuts:
            local = balance(
                len(segment), self._sizes[rank], lambda _, cut: self._seconds([segment[cut.start : cut.stop]])
            )
            self._cuts[rank, segment] = tuple(segment[cut.start : cut.stop] for cut in local)
        return self._cuts[rank, segment]

    def _exclude(self, rank: int, segment: range, rows: list[StageMemory], limit: int) -> None:
        """Exclude a segment that is too large, and longer ones that must be too large as well."""
        if total_bytes(rows) > limit:
            self._too_large.add((rank, segment))
        # Everything except the messages of a stage only grows with further layers.
        if self._sizes[rank] == 1 and rows[0].total - rows[0].messages > limit:
            least = self._too_large_from.get((rank, segment.start), self._layers + 1)
            self._too_large_from[rank, segment.start] = min(least, segment.stop)


def total_bytes(rows: Sequence[StageMemory]) -> int:
    """Return the bytes of several stages."""
    return sum(row.total for row in rows)
