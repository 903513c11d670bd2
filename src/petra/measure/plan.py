"""Which layers each rank should hold, and what to expect of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from torch import nn

from petra.execution import DoesNotFit, Rehearsal, assign, balance, partition
from petra.execution.envelope import Template, payload
from petra.execution.stage import Loss, OptimizerFactory
from petra.execution.templates import shapes_of
from petra.measure.forecast import Forecast
from petra.measure.memory import StageMemory
from petra.measure.profile import Profile
from petra.measure.ticks import Link, tick_seconds
from petra.methods import Method
from petra.reversible.streams import Streams
from petra.schedule import Order, Sequential
from petra.tables import mebibytes


@dataclass(frozen=True)
class Plan:
    """A cut, with predictions for it."""

    stages: list[int]
    """Layers of each stage."""
    placement: list[int]
    """The rank of each stage."""
    seconds: list[float]
    """Of each rank's own work in a tick."""
    tick: float
    """Seconds of a tick: those of the busiest rank, and what it has to wait."""
    basic: float
    """Seconds of a micro-batch by basic model parallelism on the same cut."""
    up_bytes: list[int]
    """Per micro-batch, from each stage to the next."""
    down_bytes: list[int]
    """Per micro-batch, to each stage from the next."""
    memory: list[int]
    """Most bytes of each rank."""

    @property
    def speedup(self) -> float:
        """Over basic model parallelism."""
        return self.basic / self.tick

    @property
    def layers(self) -> list[list[int]]:
        """Layers of each rank."""
        found: list[list[int]] = [[] for _ in self._ranks]
        for cut, rank in zip(partition(sum(self.stages), self.stages), self.placement, strict=True):
            found[rank] += cut
        return found

    @property
    def in_a_row(self) -> bool:
        """Whether each rank holds neighbouring stages, in numbers as the trainer deals them out by itself."""
        ranks = len(self._ranks)
        return self.placement == [r for r, own in enumerate(partition(len(self.stages), ranks)) for _ in own]

    @property
    def sent_up(self) -> list[int]:
        """Bytes per micro-batch that each rank sends to the rank of the next stage."""
        return self._sent(self.up_bytes, 0, 1)

    @property
    def sent_down(self) -> list[int]:
        """Bytes per micro-batch that each rank sends to the rank of the stage before."""
        return self._sent(self.down_bytes, 1, 0)

    @property
    def _ranks(self) -> range:
        return range(self.placement[-1] + 1)

    def _sent(self, sizes: list[int], source: int, to: int) -> list[int]:
        total = [0] * len(self._ranks)
        for border, size in enumerate(sizes):
            if self.placement[border + source] != self.placement[border + to]:
                total[self.placement[border + source]] += size
        return total


def make_plan(
    layers: Sequence[nn.Module],
    method: Method,
    order: Callable[[int], Order],
    profile: Profile,
    *,
    ranks: int,
    inputs: Streams,
    targets: Any,
    loss: Loss,
    optimizer: OptimizerFactory,
    stages: int | Sequence[int] | None = None,
    basic: Profile | None = None,
    link: Link | None = None,
    memory_limit: int | None = None,
) -> Plan:
    """The cut whose tick is shortest, among those whose ranks hold at most ``memory_limit`` bytes.

    ``stages`` is their number, or the layers of each if these are decided; then ranks hold neighbouring stages in
    equal numbers, as the trainer deals them out by itself. If it is left out, that is one stage a rank, or a few
    more, not all of them neighbours, where this makes a tick shorter by a good deal. ``order`` makes the order for
    a number of stages. ``profile`` is that of ``method``, ``basic`` that of basic model parallelism if it is
    another: one rank at work is often faster than one of many.
    """
    forecast = Forecast(layers, method, inputs, targets, loss=loss, optimizer=optimizer)
    planner = _Planner(forecast, order, profile, basic or profile, link or Link(), memory_limit)
    plan = planner.in_a_row(ranks, ranks if stages is None else stages)
    if stages is None and ranks > 1:
        for count in range(ranks + 1, min(len(layers), 2 * ranks) + 1):
            plan = planner.scattered(ranks, count, plan.tick * (1 - WORTH)) or plan
    return plan


WORTH = 0.03
"""What has to be gained by more stages, which mean more staleness and more messages."""


@dataclass(frozen=True)
class _Planner:
    """Everything that a plan depends on, but the cut."""

    forecast: Forecast
    order: Callable[[int], Order]
    profile: Profile
    basic: Profile
    link: Link
    limit: int | None

    def in_a_row(self, ranks: int, stages: int | Sequence[int]) -> Plan:
        """The best plan whose ranks hold neighbouring stages."""
        layers = len(self.forecast.layers)
        given = partition(layers, stages)
        if len(given) < ranks:
            raise ValueError(
                f"{len(given)} stages cannot keep {ranks} ranks busy: give at least as many stages as ranks"
            )
        dealt = partition(len(given), ranks)
        order = self.order(len(given))

        @cache
        def held(rank: int, cuts: tuple[range, ...]) -> list[StageMemory]:
            return self.forecast.memory(cuts, dealt[rank].start, order)

        if isinstance(stages, int):
            sizes = [len(own) for own in dealt]
            parts = Search(layers, sizes, lambda cuts: self._seconds(cuts, order), held, self.limit).best()
        else:
            parts = [tuple(given[s] for s in own) for own in dealt]
        memory = [_total(held(rank, part)) for rank, part in enumerate(parts)]
        for rank, needed in enumerate(memory):
            if self.limit is not None and needed > self.limit:
                raise ValueError(
                    f"rank {rank} would hold {mebibytes(needed)}, above the limit of {mebibytes(self.limit)}: "
                    "give the number of stages instead of their layers, or raise the limit"
                )
        cuts = [cut for part in parts for cut in part]
        return self._plan(cuts, [rank for rank, part in enumerate(parts) for _ in part], order, memory)

    def scattered(self, ranks: int, stages: int, below: float) -> Plan | None:
        """A plan whose stages lie on any rank, if it fits and has a tick ``below`` that."""
        order = self.order(stages)
        cuts = balance(len(self.forecast.layers), stages, lambda _, cut: self._seconds([cut], order))
        placement = assign([self._seconds([cut], order) for cut in cuts], ranks)
        plan = self._plan(cuts, placement, order, [])
        if plan.tick >= below:
            return None
        memory = [0] * ranks
        for rank, run in _runs(placement):
            memory[rank] += _total(self.forecast.memory([cuts[s] for s in run], run.start, order))
        return None if self.limit is not None and max(memory) > self.limit else replace(plan, memory=memory)

    def _seconds(self, cuts: Sequence[range], order: Order) -> float:
        return sum(self.profile.stage(cut).per_tick(order.accumulate) for cut in cuts)

    def _plan(self, cuts: list[range], placement: list[int], order: Order, memory: list[int]) -> Plan:
        shapes = Rehearsal(self.forecast.layers, cuts, self.forecast.method).shapes(shapes_of(self.forecast.inputs))
        ups, downs = shapes.ups[1:], shapes.downs[:-1]
        ways = [self.link.of(message) for message in ups], [self.link.of(message) for message in downs]
        seconds = [0.0] * (max(placement) + 1)
        for cut, rank in zip(cuts, placement, strict=True):
            seconds[rank] += self._seconds([cut], order)
        sequential = Sequential(len(cuts), order.accumulate)
        return Plan(
            stages=[len(cut) for cut in cuts],
            placement=placement,
            seconds=seconds,
            tick=tick_seconds(order, placement, [self.profile.stage(cut) for cut in cuts], *ways),
            basic=tick_seconds(sequential, placement, [self.basic.stage(cut) for cut in cuts], *ways),
            up_bytes=[_size(message) for message in ups],
            down_bytes=[_size(message) for message in downs],
            memory=memory,
        )


def _runs(placement: Sequence[int]) -> list[tuple[int, range]]:
    """Neighbouring stages of the same rank."""
    starts = [s for s in range(len(placement)) if s == 0 or placement[s] != placement[s - 1]]
    return [(placement[a], range(a, b)) for a, b in pairwise([*starts, len(placement)])]


class Search:
    """The best layers of each rank within the limit; ``sizes`` are the stages of each rank.

    Memory is forecast only where the choice falls, and the choice made again without what turned out too large:
    a forecast takes far longer than a choice.
    """

    def __init__(
        self,
        layers: int,
        sizes: list[int],
        seconds: Callable[[Sequence[range]], float],
        held: Callable[[int, tuple[range, ...]], list[StageMemory]],
        limit: int | None,
    ) -> None:
        self._layers, self._sizes, self._seconds, self._held, self._limit = layers, sizes, seconds, held, limit
        self._out: set[tuple[int, range]] = set()
        self._out_from: dict[tuple[int, int], int] = {}  # rank, first layer -> the least end that is too far
        self._inner: dict[tuple[int, range], tuple[range, ...]] = {}

    def best(self) -> list[tuple[range, ...]]:
        """The stages of each rank."""
        runs = self._choose()
        fastest: int | None = None
        while self._limit is not None:
            rows = [self._held(rank, self._stages(rank, run)) for rank, run in enumerate(runs)]
            fastest = fastest or max(map(_total, rows))
            if max(map(_total, rows)) <= self._limit:
                break
            for rank, run in enumerate(runs):
                self._rule_out(rank, run, rows[rank], self._limit)
            try:
                runs = self._choose()
            except DoesNotFit as error:
                raise ValueError(
                    f"rank {error.part} has no room for {error.layers} within {mebibytes(self._limit)} a rank "
                    f"(the fastest cut takes {mebibytes(fastest)}): raise the limit, or use more ranks or smaller "
                    "micro-batches"
                ) from None
        return [self._stages(rank, run) for rank, run in enumerate(runs)]

    def _choose(self) -> list[range]:
        return balance(
            self._layers,
            len(self._sizes),
            lambda rank, run: self._seconds(self._stages(rank, run)),
            lambda rank, run: (
                len(run) >= self._sizes[rank]
                and (rank, run) not in self._out
                and run.stop < self._out_from.get((rank, run.start), self._layers + 1)
            ),
        )

    def _stages(self, rank: int, run: range) -> tuple[range, ...]:
        """The layers of a rank, cut into its stages."""
        if (rank, run) not in self._inner:
            local = balance(len(run), self._sizes[rank], lambda _, cut: self._seconds([run[cut.start : cut.stop]]))
            self._inner[rank, run] = tuple(run[cut.start : cut.stop] for cut in local)
        return self._inner[rank, run]

    def _rule_out(self, rank: int, run: range, rows: list[StageMemory], limit: int) -> None:
        if _total(rows) > limit:
            self._out.add((rank, run))
        # All but the messages of one stage only grows with layers on top of it.
        if self._sizes[rank] == 1 and rows[0].total - rows[0].messages > limit:
            least = self._out_from.get((rank, run.start), self._layers + 1)
            self._out_from[rank, run.start] = min(least, run.stop)


def _total(rows: Sequence[StageMemory]) -> int:
    return sum(row.total for row in rows)


def _size(message: Template) -> int:
    return payload([x for x in message if x is not None])
