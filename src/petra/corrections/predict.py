"""Linear weight prediction (Kosson et al., "Pipelined Backpropagation at Scale", 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from petra.corrections.correction import Correction, Site, Weights
from petra.corrections.rates import rate_of


@dataclass(frozen=True)
class Predict(Correction):
    """Forward with θ - lr·d·v, a guess at the weights of the backward d updates later; backward with θ as always.

    v is what the optimizer moves along if no new gradient comes: the momentum buffer of SGD, m̂/(√v̂ + ε) of Adam.
    Nothing is predicted before the first update.
    """

    name = "predict"
    summary = "forward with weights extrapolated to the backward (linear weight prediction, Kosson et al.)"
    example = "predict"

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.SGD):
            if not all(group["momentum"] for group in optimizer.param_groups):
                raise ValueError(
                    "predict follows the momentum of SGD, which is 0: give a momentum, or leave predict out"
                )
        elif not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            raise ValueError(
                f"predict knows where SGD with momentum, Adam and AdamW move, not {type(optimizer).__name__}: "
                "use one of them, or leave predict out"
            )

    @torch.no_grad()
    def forward_weights(self, site: Site, delay: int) -> Weights | None:
        if site.updates == 0:
            return None
        found: dict[Tensor, Tensor] = {}
        for parameter, group in site.groups():
            v = _velocity(site.optimizer, parameter, group)
            found[parameter] = parameter.clone() if v is None else parameter - rate_of(group, site.rate) * delay * v
        return [found.get(p, p.data) for p in site.parameters]


def _velocity(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor | None:
    state: dict[str, Tensor] = optimizer.state.get(parameter, {})
    if isinstance(optimizer, torch.optim.SGD):
        return state.get("momentum_buffer")
    if "step" not in state:
        return None
    step = float(state["step"]) if state["step"].device.type == "cpu" else state["step"].double()
    beta1, beta2 = group["betas"]
    second = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"] / (1 - beta2**step)
    first: Tensor = state["exp_avg"] / (1 - beta1**step)
    velocity: Tensor = first / (second.sqrt() + group["eps"])
    return velocity
