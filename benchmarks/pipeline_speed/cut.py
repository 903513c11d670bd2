"""Cuts a network into stages by what its layers cost on this machine."""

from __future__ import annotations

from pipelines import sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from petra import METHODS
from petra.execution import Transport, balance
from petra.measure import Profile, make_plan, profile

Cut = tuple[list[int], list[int]]
"""Layers of each stage, and the rank of each stage."""


def cut_by_cost(
    network: nn.Sequential, x: Tensor, y: Tensor, repeats: int, transport: Transport, in_a_row: bool
) -> tuple[Cut, list[float]]:
    """The cut that `petra plan` would choose for the paper's order, and the seconds of each layer.

    All ranks time the layers at once, as they will work at once. With ``in_a_row`` there is one stage a rank.
    """
    method, ranks = METHODS["petra"], transport.place.ranks
    parts = {"loss": cross_entropy, "optimizer": sgd}
    transport.gather(None)
    own = profile(list(network), method, (x,), y, repeats=repeats, **parts)
    found = Profile.median([Profile.from_json(said) for said in transport.gather(own.to_json())])
    plan = make_plan(
        list(network),
        method,
        lambda stages: method.order(stages, 1),
        found,
        ranks=ranks,
        stages=ranks if in_a_row else None,
        inputs=(x,),
        targets=y,
        **parts,
    )
    stages, placement = transport.gather([plan.stages, plan.placement])[0]
    return (stages, placement), [layer.per_tick(1) for layer in found.layers]


def cut_for_replay(
    network: nn.Sequential, x: Tensor, y: Tensor, repeats: int, transport: Transport
) -> tuple[Cut, list[float]]:
    """The cut whose busiest rank has least to do in Features Replay, one stage a rank, and the seconds of each layer.

    Layers of the last stage are played and replayed in one, so they cost what they cost in backprop.
    """
    ranks = transport.place.ranks
    profiles = []
    for name in ("features-replay", "backprop"):
        transport.gather(None)
        own = profile(
            list(network), METHODS[name], (x,), y, repeats=repeats, loss=cross_entropy, optimizer=sgd
        ).to_json()
        profiles.append(Profile.median([Profile.from_json(said) for said in transport.gather(own)]))
    replayed, played = ([layer.per_tick(1) for layer in found.layers] for found in profiles)
    parts = balance(
        len(replayed), ranks, lambda part, run: sum((played if part == ranks - 1 else replayed)[i] for i in run)
    )
    sizes = transport.gather([len(part) for part in parts])[0]
    return (sizes, list(range(ranks))), replayed
