"""Cuts layers, and deals stages out, so that the dearest part is as cheap as it can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import add

Cost = Callable[[int, range], float]
Fits = Callable[[int, range], bool]


class DoesNotFit(ValueError):
    """No cut respects the limit: ``part`` cannot hold ``run``, where the cuts that get furthest would need it to."""

    def __init__(self, part: int, run: range) -> None:
        self.part, self.run = part, run
        super().__init__(
            f"part {part} cannot hold {self.layers} within its limit: raise the limit, or cut into more parts"
        )

    @property
    def layers(self) -> str:
        """The run in words."""
        first, last = self.run[0], self.run[-1]
        return f"layer {first}" if first == last else f"layers {first} to {last}"


def balance(layers: int, parts: int, cost: Cost, fits: Fits | None = None) -> list[range]:
    """The cut of layers 0 … layers-1 into runs whose largest ``cost(part, run)`` is least.

    Of several such cuts, it is the one with the least sum of squares, which evens out the other parts. Only
    cuts with ``fits(part, run)`` for every part count.

    >>> costs = [5, 1, 1, 1, 2]
    >>> balance(5, 3, lambda part, run: sum(costs[i] for i in run))
    [range(0, 1), range(1, 3), range(3, 5)]
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}: give 1 or more")
    if parts > layers:
        raise ValueError(f"{layers} layers cannot be cut into {parts} parts: give at most {layers}")

    @cache
    def price(part: int, start: int, stop: int) -> float | None:
        run = range(start, stop)
        return float(cost(part, run)) if fits is None or fits(part, run) else None

    # Two passes, because the cut of least sum of squares may begin with a part that is not the best by itself.
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
    """The least joined price and its cut, by dynamic programming; a price of None rules a run out."""
    reached: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # part -> end -> least price, start of the last run
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
            raise DoesNotFit(part, range(furthest, layers if last else furthest + 1))
        reached.append(ends)
    cut: list[range] = []
    stop = layers
    for part in range(parts, 0, -1):
        start = reached[part][stop][1]
        cut.insert(0, range(start, stop))
        stop = start
    return reached[parts][layers][0], cut


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each stage, in any order, such that the busiest rank has little to do.

    The dearest stage first, each to the rank with least so far; then stages move or change places as long as that
    helps. The last stage is on the last rank, and otherwise ranks are numbered as the stages come.

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
    """Take something off the busiest rank, if that leaves a smaller largest load."""
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
