"""Decides which layers each rank holds, and predicts the time and memory of the result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

from torch import nn

from petra.formatting import mebibytes
from petra.measure.memory_estimate import MemoryEstimator
from petra.measure.partition_search import PartitionSearch, total_bytes
from petra.measure.profile import Profile
from petra.measure.stage_memory import StageMemory
from petra.measure.tick_time import Link, tick_seconds
from petra.methods import Method, ReversibleBackprop
from petra.pipeline import ShapeInference, assign, balance, partition
from petra.pipeline.message_layout import Template, payload
from petra.pipeline.message_shapes import shapes_of
from petra.pipeline.optimizer_factory import OptimizerFactory
from petra.pipeline.stage import Loss
from petra.reversible import ReversibleLayer
from petra.reversible.storage import shorten_storages
from petra.reversible.streams import Streams
from petra.schedule import PipelineSchedule, SequentialSchedule


@dataclass(frozen=True)
class Plan:
    """A partition of the network with its predicted time and memory."""

    stages: list[int]
    """The number of layers of each stage."""
    placement: list[int]
    """The rank of each stage."""
    seconds: list[float]
    """Seconds that each rank computes per tick."""
    tick: float
    """Seconds of a tick: those of the busiest rank, and its waiting time."""
    basic: float
    """Seconds of a micro-batch with basic model parallelism on the same partition."""
    up_bytes: list[int]
    """Bytes per micro-batch from each stage to the next."""
    down_bytes: list[int]
    """Bytes per micro-batch to each stage from the next."""
    memory: list[int]
    """Peak bytes of each rank."""
    storage: list[str] = field(default_factory=list)
    """The storages of the layers, as `petra train --storage` takes them; empty for the default."""

    @property
    def speedup(self) -> float:
        """The speedup over basic model parallelism."""
        return self.basic / self.tick

    @property
    def layers(self) -> list[list[int]]:
        """The indices of the layers of each rank."""
        found: list[list[int]] = [[] for _ in self._ranks]
        for cut, rank in zip(partition(sum(self.stages), self.stages), self.placement, strict=True):
            found[rank] += cut
        return found

    @property
    def contiguous(self) -> bool:
        """True if the placement is the default of the trainer: consecutive stages, in equal numbers."""
        ranks = len(self._ranks)
        return self.placement == [r for r, stages in enumerate(partition(len(self.stages), ranks)) for _ in stages]

    @property
    def sent_up(self) -> list[int]:
        """Bytes per micro-batch that each rank sends to the rank of the next stage."""
        return self._sent(self.up_bytes, 0, 1)

    @property
    def sent_down(self) -> list[int]:
        """Bytes per micro-batch that each rank sends to the rank of the previous stage."""
        return self._sent(self.down_bytes, 1, 0)

    @property
    def _ranks(self) -> range:
        return range(self.placement[-1] + 1)

    def _sent(self, sizes: list[int], source: int, to: int) -> list[int]:
        total = [0] * len(self._ranks)
        for boundary, size in enumerate(sizes):
            if self.placement[boundary + source] != self.placement[boundary + to]:
                total[self.placement[boundary + source]] += size
        return total


def make_plan(
    layers: Sequence[nn.Module],
    method: Method,
    schedule: Callable[[int], PipelineSchedule],
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
    """Find the partition with the shortest tick.

    Args:
        layers: The layers of the network.
        method: The method to train with.
        schedule: Creates the schedule for a number of stages.
        profile: The times of the layers with this method.
        ranks: The number of ranks.
        inputs: The inputs of a micro-batch; only shapes and dtypes matter.
        targets: The targets of a micro-batch.
        loss: The loss.
        optimizer: Creates an optimizer for a list of parameters.
        stages: The number of stages, or the number of layers of each stage. Ranks then hold consecutive stages in equal
            numbers, which is the default of the trainer. Without it, there is one stage per rank, or up to two with any
            placement if this shortens a tick considerably.
        basic: The times of the layers with basic model parallelism, if they differ from `profile`. One rank that
            computes alone is often faster than one of many.
        link: The speed of messages between ranks.
        memory_limit: The largest number of bytes of a rank. With method reversible, a rank stores the activations of as
            many layers as fit, so that it does not compute them again.

    Returns:
        The plan.

    Raises:
        ValueError: If no partition respects the memory limit, or if there are fewer stages than ranks.
    """
    memory_estimator = MemoryEstimator(layers, method, inputs, targets, loss=loss, optimizer=optimizer)
    planner = _Planner(memory_estimator, schedule, profile, basic or profile, link or Link(), memory_limit)
    plan = planner.contiguous(ranks, ranks if stages is None else stages)
    if stages is None and ranks > 1:
        for count in range(ranks + 1, min(len(layers), 2 * ranks) + 1):
            plan = planner.scattered(ranks, count, plan.tick * (1 - MIN_GAIN)) or plan
    return planner.with_storage(plan)


MIN_GAIN = 0.03
"""The least relative gain that justifies more stages, which cause more staleness and more messages."""


@dataclass(frozen=True)
class _Planner:
    """Everything that a plan depends on, except the partition."""

    memory_estimator: MemoryEstimator
    schedule: Callable[[int], PipelineSchedule]
    profile: Profile
    basic: Profile
    link: Link
    limit: int | None

    def contiguous(self, ranks: int, stages: int | Sequence[int]) -> Plan:
        """Return the best plan in which ranks hold consecutive stages."""
        layers = len(self.memory_estimator.layers)
        cuts = partition(layers, stages)
        if len(cuts) < ranks:
            raise ValueError(
                f"{len(cuts)} stages cannot keep {ranks} ranks busy: give at least as many stages as ranks"
            )
        stages_of_ranks = partition(len(cuts), ranks)
        schedule = self.schedule(len(cuts))

        @cache
        def memory_of(rank: int, cuts: tuple[range, ...]) -> list[StageMemory]:
            return self.memory_estimator.memory(cuts, stages_of_ranks[rank].start, schedule)

        if isinstance(stages, int):
            sizes = [len(own) for own in stages_of_ranks]
            search = PartitionSearch(layers, sizes, lambda cuts: self._seconds(cuts, schedule), memory_of, self.limit)
            parts = search.best()
        else:
            parts = [tuple(cuts[s] for s in own) for own in stages_of_ranks]
        memory = [total_bytes(memory_of(rank, part)) for rank, part in enumerate(parts)]
        for rank, needed in enumerate(memory):
            if self.limit is not None and needed > self.limit:
                raise ValueError(
                    f"rank {rank} needs {mebibytes(needed)}, which exceeds the limit of {mebibytes(self.limit)}: "
                    "give the number of stages instead of their layers, or raise the limit"
                )
        cuts = [cut for part in parts for cut in part]
        return self._plan(cuts, [rank for rank, part in enumerate(parts) for _ in part], schedule, memory)

    def scattered(self, ranks: int, stages: int, below: float) -> Plan | None:
        """Return a plan with any placement, or None if its tick is not shorter than ``below`` or it does not fit."""
        schedule = self.schedule(stages)
        cuts = balance(len(self.memory_estimator.layers), stages, lambda _, cut: self._seconds([cut], schedule))
        placement = assign([self._seconds([cut], schedule) for cut in cuts], ranks)
        plan = self._plan(cuts, placement, schedule, [])
        if plan.tick >= below:
            return None
        memory = [0] * ranks
        for rank, group in _consecutive_stages(placement):
            memory[rank] += total_bytes(self.memory_estimator.memory([cuts[s] for s in group], group.start, schedule))
        return None if self.limit is not None and max(memory) > self.limit else replace(plan, memory=memory)

    def with_storage(self, plan: Plan) -> Plan:
        """Store the activations of reversible layers where memory allows, so that their rank computes less."""
        estimator = self.memory_estimator
        reversible = [isinstance(layer, ReversibleLayer) for layer in estimator.layers]
        if self.limit is None or not any(reversible) or not isinstance(estimator.method, ReversibleBackprop):
            return plan
        # `store` is the only storage of other layers that a trainer takes.
        none = tuple("reconstruct" if own else "store" for own in reversible)

        @cache
        def memory_of(rank: int, own: frozenset[int]) -> int:
            return self._memory_of(plan, rank, _store(none, own))

        stored: set[int] = set()
        memory = []
        for rank, layers in enumerate(plan.layers):
            own: frozenset[int] = frozenset()
            needed = memory_of(rank, own)
            candidates = [layer for layer in layers if reversible[layer]]
            more = {layer: memory_of(rank, frozenset([layer])) - needed for layer in candidates}
            candidates.sort(key=lambda layer: more[layer] / max(self.profile.layers[layer].forward, 1e-9))
            before = None
            while own != before:  # again, because two neighbours may need less than one of them
                before = own
                for layer in candidates:
                    if (with_it := memory_of(rank, own | {layer})) <= max(self.limit, needed):
                        needed, own = with_it, own | {layer}
            if needed > self.limit:
                return plan
            stored |= own
            memory.append(needed)
        if not stored:
            return plan
        storages = _store(none, stored)
        faster = replace(self, profile=self.profile.storing(stored))
        cuts = partition(len(estimator.layers), plan.stages)
        found = faster._plan(cuts, plan.placement, self.schedule(len(cuts)), memory)
        return replace(found, storage=list(shorten_storages(storages)))

    def _memory_of(self, plan: Plan, rank: int, storages: Sequence[str]) -> int:
        """Return the bytes of a rank if layers have these storages."""
        estimator = self.memory_estimator.with_storage(storages)
        cuts = partition(len(estimator.layers), plan.stages)
        return sum(
            total_bytes(estimator.memory([cuts[s] for s in group], group.start, self.schedule(len(cuts))))
            for owner, group in _consecutive_stages(plan.placement)
            if owner == rank
        )

    def _seconds(self, cuts: Sequence[range], schedule: PipelineSchedule) -> float:
        return sum(self.profile.stage(cut).per_tick(schedule.accumulate) for cut in cuts)

    def _plan(self, cuts: list[range], placement: list[int], schedule: PipelineSchedule, memory: list[int]) -> Plan:
        shapes = ShapeInference(self.memory_estimator.layers, cuts, self.memory_estimator.method).shapes(
            shapes_of(self.memory_estimator.inputs)
        )
        forward, backward = shapes.forward[1:], shapes.backward[:-1]
        delays = [self.link.of(message) for message in forward], [self.link.of(message) for message in backward]
        seconds = [0.0] * (max(placement) + 1)
        for cut, rank in zip(cuts, placement, strict=True):
            seconds[rank] += self._seconds([cut], schedule)
        sequential = SequentialSchedule(len(cuts), schedule.accumulate)
        return Plan(
            stages=[len(cut) for cut in cuts],
            placement=placement,
            seconds=seconds,
            tick=tick_seconds(schedule, placement, [self.profile.stage(cut) for cut in cuts], *delays),
            basic=tick_seconds(sequential, placement, [self.basic.stage(cut) for cut in cuts], *delays),
            up_bytes=[_size(message) for message in forward],
            down_bytes=[_size(message) for message in backward],
            memory=memory,
        )


def _consecutive_stages(placement: Sequence[int]) -> list[tuple[int, range]]:
    """Return the groups of consecutive stages on the same rank, with their rank."""
    starts = [s for s in range(len(placement)) if s == 0 or placement[s] != placement[s - 1]]
    return [(placement[a], range(a, b)) for a, b in pairwise([*starts, len(placement)])]


def _store(storages: Sequence[str], layers: Collection[int]) -> tuple[str, ...]:
    return tuple("store" if index in layers else storage for index, storage in enumerate(storages))


def _size(message: Template) -> int:
    return payload([x for x in message if x is not None])
