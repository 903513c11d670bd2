"""Cuts a network into stages by what its layers cost on this machine."""

from __future__ import annotations

from pipelines import sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from petra import METHODS
from petra.execution import Transport
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
