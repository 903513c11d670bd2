"""Weight prediction: linear (Kosson et al., "Pipelined Backpropagation at Scale", 2021), or by momentum alone."""

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
    Nothing is predicted before the first update, nor where τ < 1: some micro-batches of an update have current weights
    then, and others those of before, of which the mean is mostly steadier than what it would be with a guess.
    """

    name = "predict"
    summary = "forward with weights extrapolated to the backward (linear weight prediction, Kosson et al.)"
    example = "predict"

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.SGD):
            if not all(group["momentum"] for group in optimizer.param_groups):
                raise ValueError(
                    f"{self.name} follows the momentum of SGD, which is 0: give a momentum, or leave {self.name} out"
                )
        elif not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            raise ValueError(
                f"{self.name} knows where SGD with momentum, Adam and AdamW move, not {type(optimizer).__name__}: "
                f"use one of them, or leave {self.name} out"
            )

    def steps(self, site: Site, delay: int, group: dict[str, Any]) -> float:
        """How many steps along v are made in ``delay`` updates."""
        return delay

    @torch.no_grad()
    def forward_weights(self, site: Site, delay: int) -> Weights | None:
        if site.updates == 0 or site.staleness < 1:
            return None
        found: dict[Tensor, Tensor] = {}
        for group in site.optimizer.param_groups:
            rate = rate_of(group, site.rate)
            # On a device as on the host: rounded once.
            ahead = (rate.double() if isinstance(rate, Tensor) else rate) * self.steps(site, delay, group)
            for parameter in group["params"]:
                # What has been frozen since stays where it is, whatever its momentum was.
                v = _velocity(site.optimizer, parameter, group) if parameter.requires_grad else None
                found[parameter] = parameter.clone() if v is None else parameter - ahead * v
        return [found.get(p, p.data) for p in site.parameters]


@dataclass(frozen=True)
class Coast(Predict):
    """Forward with θ - lr·(r + r² + … + r^d)·v, one more r with Nesterov's momentum; r is that of the optimizer, m.

    `Predict` takes v for what every update will move by. That holds for the mean gradient, but most of a batch's
    gradient is noise, which the next batch does not repeat: with r = m this is where momentum alone leads. A smaller
    r allows for gradients that pull back what noise has moved.
    """

    decay: float | None = None

    name = "coast"
    summary = "forward with the weights that momentum alone (or a factor of its own) leads to"
    example = "coast:0.8"

    def __post_init__(self) -> None:
        if self.decay is not None and not 0 < self.decay <= 1:
            raise ValueError(f"coast:{self.decay:g} moves by a sum of powers: give a factor above 0 and up to 1")

    def steps(self, site: Site, delay: int, group: dict[str, Any]) -> float:
        r = self.decay or (site.momentum(group) if "momentum" in group else float(group["betas"][0]))
        return sum(r ** (i + bool(group.get("nesterov"))) for i in range(1, delay + 1))


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
