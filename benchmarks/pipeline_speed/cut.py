"""Cuts a network into stages by what its layers cost on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations, pairwise

import torch.distributed as dist
from pipelines import Busy, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import petra


def layer_costs(network: nn.Sequential, x: Tensor, y: Tensor, ticks: int) -> list[float]:
    """Seconds of forward, backward and update of each layer as a stage of its own.

    All ranks measure at the same time, as they will work at the same time; the mean of their medians.
    """
    trainer = petra.Trainer(network, loss=cross_entropy, optimizer=sgd, method="reversible", stages=len(network))
    busy = [Busy() for _ in trainer.stages]
    for watch, stage in zip(busy, trainer.stages, strict=True):
        watch.watch(stage, "forward", "finish", "backward", "update")
    trainer.step(x, y)  # warm-up
    readings = [[watch.seconds for watch in busy]]
    for _ in range(ticks):
        dist.barrier()
        trainer.step(x, y)
        readings.append([watch.seconds for watch in busy])
    medians = [statistics.median(b - a for a, b in pairwise(layer)) for layer in zip(*readings, strict=True)]
    everyone: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, medians)
    return [statistics.fmean(layer) for layer in zip(*everyone, strict=True)]


def cut_by_cost(costs: Sequence[float], ranks: int) -> list[int]:
    """How many layers each rank gets, so that the busiest has as little to do as can be.

    >>> cut_by_cost([1, 4, 4, 2, 2, 1], 3)
    [2, 1, 3]
    """

    def loads(bounds: tuple[int, ...]) -> list[float]:
        return sorted((sum(costs[a:b]) for a, b in pairwise(bounds)), reverse=True)

    inner = combinations(range(1, len(costs)), ranks - 1)
    best = min(((0, *bounds, len(costs)) for bounds in inner), key=loads)
    return [b - a for a, b in pairwise(best)]
