"""Partitions a network into stages by the measured cost of its layers."""

from __future__ import annotations

from pipelines import sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from petra import METHODS
from petra.distributed import Transport
from petra.measure import Profile, make_plan, profile
from petra.pipeline import balance

Cut = tuple[list[int], list[int]]
"""Layers of each stage, and the rank of each stage."""


def cut_by_cost(
    network: nn.Sequential, x: Tensor, y: Tensor, repeats: int, transport: Transport, contiguous: bool
) -> tuple[Cut, list[float]]:
    """Return the cut that `petra plan` would choose for the paper's schedule, and the seconds of each layer.

    All ranks time the layers at the same time, because they also train at the same time. With `contiguous` there is
    one stage per rank.
    """
    method, ranks = METHODS["petra"], transport.position.ranks
    parts = {"loss": cross_entropy, "optimizer": sgd}
    transport.gather(None)
    own = profile(list(network), method, (x,), y, repeats=repeats, **parts)
    found = Profile.median([Profile.from_json(said) for said in transport.gather(own.to_json())])
    plan = make_plan(
        list(network),
        method,
        lambda stages: method.schedule(stages, 1),
        found,
        ranks=ranks,
        stages=ranks if contiguous else None,
        inputs=(x,),
        targets=y,
        **parts,
    )
    stages, placement = transport.gather([plan.stages, plan.placement])[0]
    return (stages, placement), [layer.per_tick(1) for layer in found.layers]


def cut_for_replay(
    network: nn.Sequential, x: Tensor, y: Tensor, repeats: int, transport: Transport
) -> tuple[Cut, list[float]]:
    """Return the cut with the least work on the busiest rank in Features Replay, and the seconds of each layer.

    There is one stage per rank. The last stage needs no second forward, so its layers cost the same as in backprop.
    """
    ranks = transport.position.ranks
    profiles = []
    for name in ("features-replay", "backprop"):
        transport.gather(None)
        own = profile(
            list(network), METHODS[name], (x,), y, repeats=repeats, loss=cross_entropy, optimizer=sgd
        ).to_json()
        profiles.append(Profile.median([Profile.from_json(said) for said in transport.gather(own)]))
    replayed, plain = ([layer.per_tick(1) for layer in found.layers] for found in profiles)
    parts = balance(
        len(replayed), ranks, lambda part, layers: sum((plain if part == ranks - 1 else replayed)[i] for i in layers)
    )
    sizes = transport.gather([len(part) for part in parts])[0]
    return (sizes, list(range(ranks))), replayed
