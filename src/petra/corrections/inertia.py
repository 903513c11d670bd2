"""More momentum where gradients come later."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from petra.corrections.correction import Correction, Site


@dataclass(frozen=True)
class Inertia(Correction):
    """Momentum m_s with 1/(1 - m_s) = max(1/(1 - m), c·k·τ²·ρ), and a learning rate of lr·(1 - m_s)/(1 - m).

    What a gradient does to the weights in the end is the same, only slower. An update that comes τ too late then
    stays stable at sharper curvatures, if `Predict` or `Coast` looks ahead as far as it is late: with momentum near 1 a
    quadratic loss of curvature h is an oscillation of frequency √(lr_s·h), which has to be slow beside the delay. As lr
    goes with k, so does the factor: momentum remembers c·n² micro-batches where n are in flight, whatever k is. And
    as lr falls to ρ times its highest, so does what has to be remembered: long oscillations keep weights from settling.
    """

    name = "inertia"
    summary = "more momentum and a smaller rate where gradients are late; goes with predict or coast"
    example = "inertia:1.5"

    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.factor < float("inf"):
            raise ValueError(f"inertia has the factor {self.factor:g}: give more than 0, like {self.example}")

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.SGD):
            raise ValueError(
                f"inertia has a meaning for SGD with momentum, not for {type(optimizer).__name__}: leave inertia out"
            )
        momenta = sorted({group["momentum"] for group in optimizer.param_groups})
        dampened = any(group["dampening"] for group in optimizer.param_groups)
        if len(momenta) > 1 or not 0 < momenta[0] < 1 or dampened:
            raise ValueError(
                f"inertia needs one momentum between 0 and 1 without dampening, and SGD has momentum "
                f"{', '.join(f'{m:g}' for m in momenta)}{' and dampening' if dampened else ''}: "
                "change that, or leave inertia out"
            )

    def memory(self, site: Site) -> float:
        return self.factor * site.accumulate * site.staleness**2 * site.fall

    def rate(self, site: Site) -> float:
        group = site.group()
        return (1 - site.momentum(group)) / (1 - float(group["momentum"]))
