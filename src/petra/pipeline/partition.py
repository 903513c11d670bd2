"""Cuts a list of layers into stages, evenly or by cost, and assigns stages to ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import add

Cost = Callable[[int, range], float]
Fits = Callable[[int, range], bool]


def partition(layers: int, stages: int | Sequence[int]) -> list[range]:
    """Cut layers into stages.

    Args:
        layers: The number of layers.
        stages: The number of stages, about equally long, or the number of layers of each.

    Returns:
        The layers of each stage.

    Raises:
        ValueError: If the layers cannot be cut like this.

    Examples:
        >>> partition(10, 4)
        [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
        >>> partition(10, [1, 4, 4, 1])
        [range(0, 1), range(1, 5), range(5, 9), range(9, 10)]
    """
    if isinstance(stages, str | float):
        raise ValueError(f"stages is {stages!r}: give a whole number, or a list with the layers of each stage")
    if not isinstance(stages, Sequence):
        stages = int(stages)
        if stages < 1:
            raise ValueError(f"stages is {stages}: a network needs at least one")
        if stages > layers:
            raise ValueError(f"stages is {stages}, but the network has only {layers} layers: give at most {layers}")
        small, larger = divmod(layers, stages)
        sizes = [small + 1] * larger + [small] * (stages - larger)
    else:
        sizes = list(stages)
        if not sizes or min(sizes) < 1 or sum(sizes) != layers:
            wrong = f", not {sum(sizes)}" if sum(sizes) != layers else ""
            raise ValueError(
                f"stages is {sizes}: the numbers of layers of the stages must be 1 or more "
                f"and add up to the network's {layers}{wrong}"
            )
    cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [range(cuts[i], cuts[i + 1]) for i in range(len(sizes))]


class PartitionDoesNotFit(ValueError):
    """No cut respects the limit.

    Args:
        part: The first part that cannot hold its layers, in the cuts that get furthest.
        segment: Those layers.
    """

    def __init__(self, part: int, segment: range) -> None:
        self.part, self.segment = part, segment
        super().__init__(
            f"part {part} cannot hold {self.layers} within its limit: raise the limit, or cut into more parts"
        )

    @property
    def layers(self) -> str:
        """The layers in words."""
        first, last = self.segment[0], self.segment[-1]
        return f"layer {first}" if first == last else f"layers {first} to {last}"


def balance(layers: int, parts: int, cost: Cost, fits: Fits | None = None) -> list[range]:
    """Cut layers into consecutive segments such that the largest cost of a part is minimal.

    Among several such cuts, it returns the one with the least sum of squares, which evens out the other parts.

    Args:
        layers: The number of layers.
        parts: The number of parts.
        cost: The cost of a segment on a part.
        fits: Whether a part can hold a segment; by default, it always can.

    Returns:
        The layers of each part.

    Raises:
        PartitionDoesNotFit: If no cut fits.
        ValueError: If there are fewer layers than parts.

    Examples:
        >>> costs = [5, 1, 1, 1, 2]
        >>> balance(5, 3, lambda part, segment: sum(costs[i] for i in segment))
        [range(0, 1), range(1, 3), range(3, 5)]
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}: give 1 or more")
    if parts > layers:
        raise ValueError(f"{layers} layers cannot be cut into {parts} parts: give at most {layers}")

    @cache
    def price(part: int, start: int, stop: int) -> float | None:
        segment = range(start, stop)
        return float(cost(part, segment)) if fits is None or fits(part, segment) else None

    # Two passes, because the cut with the least sum of squares may begin with a part that is not the best alone.
    limit, _ = _best(layers, parts, price, max)

    def square(part: int, start: int, stop: int) -> float | None:
        own = price(part, start, stop)
        return None if own is None or own > limit else own**2

    return _best(layers, parts, square, add)[1]


def _best(
    layers: int,
    parts: int,
    price: Callable[[int, int, int], float | None],
    join: Callable[[float, float], float],
) -> tuple[float, list[range]]:
    """Return the least joined price and its cut, by dynamic programming; a price of None excludes a segment."""
    reached: list[dict[int, tuple[float, int]]] = [
        {0: (0.0, 0)}
    ]  # part -> end -> least price, start of the last segment
    for part in range(parts):
        ends: dict[int, tuple[float, int]] = {}
        last = part == parts - 1
        for start, (before, _) in reached[part].items():
            least = layers if last else start + 1
            for stop in range(least, layers - (parts - 1 - part) + 1):
                own = price(part, start, stop)
                if own is not None and (stop not in ends or join(before, own) < ends[stop][0]):
                    ends[stop] = join(before, own), start
        if not ends:
            furthest = max(reached[part])
            raise PartitionDoesNotFit(part, range(furthest, layers if last else furthest + 1))
        reached.append(ends)
    cut: list[range] = []
    stop = layers
    for part in range(parts, 0, -1):
        start = reached[part][stop][1]
        cut.insert(0, range(start, stop))
        stop = start
    return reached[parts][layers][0], cut


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """Assign stages to ranks, not necessarily consecutive ones, such that the busiest rank has little to do.

    Stages are assigned from the most to the least expensive, each to the least loaded rank; then stages move or swap as
    long as that helps. The last stage is on the last rank; the other ranks are numbered in the order of stages.

    Args:
        costs: The cost of each stage.
        ranks: The number of ranks.

    Returns:
        The rank of each stage.

    Examples:
        >>> assign([3, 9, 8, 5, 5, 1], 4)
        [0, 1, 2, 0, 3, 3]
    """
    load = [0.0] * ranks
    owner = [-1] * len(costs)
    for stage in sorted(range(len(costs)), key=lambda s: -costs[s]):
        owner[stage] = min(range(ranks), key=lambda rank: (load[rank], owner.count(rank)))
        load[owner[stage]] += costs[stage]
    while _improve(costs, owner, load):
        pass
    seen = list(dict.fromkeys(owner))
    seen.remove(owner[-1])
    number = {rank: i for i, rank in enumerate([*seen, owner[-1]])}
    return [number[rank] for rank in owner]


def _improve(costs: Sequence[float], owner: list[int], load: list[float]) -> bool:
    """Reduce the load of the busiest rank if possible."""
    busiest = max(range(len(load)), key=lambda rank: load[rank])
    for stage in (s for s in range(len(costs)) if owner[s] == busiest):
        for other in (s for s in range(len(costs)) if owner[s] != busiest):
            gain = costs[stage] - costs[other]
            if gain > 0 and load[owner[other]] + gain < load[busiest] * (1 - 1e-9):
                load[busiest] -= gain
                load[owner[other]] += gain
                owner[stage], owner[other] = owner[other], busiest
                return True
        for rank in range(len(load)):
            alone = owner.count(busiest) == 1
            if not alone and load[rank] + costs[stage] < load[busiest] * (1 - 1e-9):
                load[busiest] -= costs[stage]
                load[rank] += costs[stage]
                owner[stage] = rank
                return True
    return False
