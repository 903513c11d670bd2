"""Weight prediction: linear (Kosson et al., "Pipelined Backpropagation at Scale", 2021), or by momentum alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from petra.corrections.correction import Correction, StageContext, Weights
from petra.corrections.learning_rates import scaled_lr
from petra.optim import CapturableOptimizer


class WeightPrediction(Correction, ABC):
    """Forward with θ - lr·n·v, where v is the direction that the optimizer follows without new gradients.

    v is the momentum buffer of SGD, m̂/(√v̂ + ε) of Adam, AdamW and NAdamW, and what `directions` of other optimizers of
    `petra.optim` returns. Weight decay is left out. Nothing is predicted before the first update.
    """

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.SGD):
            if not all(group["momentum"] for group in optimizer.param_groups):
                raise ValueError(
                    f"{self.name} follows the momentum of SGD, which is 0: give a momentum, or leave {self.name} out"
                )
        elif not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.NAdam | CapturableOptimizer):
            raise ValueError(
                f"{self.name} supports SGD with momentum, Adam, AdamW, NAdam, Muon and SOAP, not "
                f"{type(optimizer).__name__}: use one of them, or leave {self.name} out"
            )

    @abstractmethod
    def steps(self, context: StageContext, delay: int, group: dict[str, Any]) -> float:
        """Return the number n of steps along v to look ahead.

        Args:
            context: The stage.
            delay: The number of updates until the backward.
            group: The group of the optimizer.

        Returns:
            The number of steps, which may be a fraction.
        """

    def applies(self, context: StageContext) -> bool:
        """Return whether the forwards of a stage are predicted.

        Where τ < 1, some micro-batches of an update see the current weights and others those of one update before, and
        predicting by exactly the delay mostly makes their mean less stable.

        Args:
            context: The stage.

        Returns:
            True where τ ≥ 1.
        """
        return context.staleness >= 1

    @torch.no_grad()
    def forward_weights(self, context: StageContext, delay: int) -> Weights | None:
        if context.updates == 0 or not self.applies(context):
            return None
        found: dict[Tensor, Tensor] = {}
        for group in context.optimizer.param_groups:
            rate = scaled_lr(group, context.lr_factor)
            # In double precision on a device too, so that the product is rounded only once, as on the host.
            ahead = (rate.double() if isinstance(rate, Tensor) else rate) * self.steps(context, delay, group)
            directions = _directions(context.optimizer, group)
            for parameter in group["params"]:
                # A parameter that was frozen in the meantime does not move, whatever its momentum.
                v = directions.get(parameter) if parameter.requires_grad else None
                found[parameter] = parameter.clone() if v is None else parameter - ahead * v
        return [found.get(p, p.data) for p in context.parameters]


@dataclass(frozen=True)
class Predict(WeightPrediction):
    """Forward with θ - lr·h·d·v, an estimate of the weights of the backward d updates later; backward with θ.

    The horizon h is 1 unless it is given. Without a given horizon, nothing is predicted where τ < 1. Theory says that a
    horizon of about 2 is most stable while delays are at most one update, so with a given horizon, micro-batches with a
    delay of one are predicted there too.

    Measured: RevNet-18 on CIFAR-10, ten stages, k = 1, 30 epochs: 92.1 % with `predict,inertia:4` and 92.4 % with
    backprop (six seeds each); 91.8 % with `predict` alone and 91.6 % without corrections (one seed each). Use it with
    `inertia`: alone it does not help reliably, and with 18 stages on digits it is worse than no correction.
    """

    name = "predict"
    summary = "forward with weights extrapolated to the backward (Kosson et al.); use it with inertia"
    example = "predict"

    horizon: float | None = None
    """h; None for 1, and for no prediction where τ < 1."""

    def __post_init__(self) -> None:
        if self.horizon is not None and not 0 < self.horizon < float("inf"):
            raise ValueError(f"predict has the horizon {self.horizon:g}: give more than 0, like predict:2")

    def applies(self, context: StageContext) -> bool:
        return self.horizon is not None or super().applies(context)

    def steps(self, context: StageContext, delay: int, group: dict[str, Any]) -> float:
        return delay if self.horizon is None else self.horizon * delay


@dataclass(frozen=True)
class Coast(WeightPrediction):
    """Forward with θ - lr·(r + r² + … + r^d)·v, with one more factor r for Nesterov momentum.

    `Predict` assumes that every update moves by v. That is true for the mean gradient, but most of a batch's gradient
    is noise, which the next batch does not repeat. With r = m, the momentum, the forward uses the weights that momentum
    alone leads to. A smaller r allows for gradients that undo what noise has changed.

    By default, r is the momentum of SGD and of the matrices of Muon, and β₁ of Adam, AdamW, NAdamW, SOAP and the AdamW
    part of Muon. NAdamW and Muon look ahead like Nesterov momentum, so they have one more factor. The step of Muon has
    the same size however small its momentum is; r is then the share of it that new gradients do not change.

    Experimental. Measured: RevNet-18 on CIFAR-10, ten stages, k = 1, 30 epochs, one seed each: 91.9 % with `coast`,
    91.5 % with `coast:0.8`, 91.6 % without corrections and 91.8 % with `predict`. These differences are within those
    between seeds. With `inertia:4` on digits, `coast` and `predict` differ by 0.2 points.
    """

    decay: float | None = None
    """r; None for the momentum of the optimizer."""

    name = "coast"
    summary = "forward with the weights that momentum alone (or another factor) leads to"
    example = "coast:0.8"
    experimental = True

    def __post_init__(self) -> None:
        if self.decay is not None and not 0 < self.decay <= 1:
            raise ValueError(f"coast has factor {self.decay:g}: give more than 0 and at most 1, like {self.example}")

    def steps(self, context: StageContext, delay: int, group: dict[str, Any]) -> float:
        optimizer = context.optimizer
        if isinstance(optimizer, CapturableOptimizer):
            own, looks_ahead = optimizer.coasting_factor(group)
        elif isinstance(optimizer, torch.optim.SGD):
            own, looks_ahead = context.momentum(group), bool(group["nesterov"])
        else:
            own, looks_ahead = float(group["betas"][0]), isinstance(optimizer, torch.optim.NAdam)
        r = self.decay or own
        return sum(r ** (i + looks_ahead) for i in range(1, delay + 1))


def _directions(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[Tensor, Tensor]:
    """Return the directions of the optimizer's next step without new gradients, for parameters with a step before."""
    if isinstance(optimizer, CapturableOptimizer):
        return optimizer.directions(group)
    found = ((p, _velocity(optimizer, p, group)) for p in group["params"])
    return {p: v for p, v in found if v is not None}


def _velocity(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor | None:
    """Return the direction of SGD's or Adam's next step without a new gradient; None before the first step."""
    state: dict[str, Tensor] = optimizer.state.get(parameter, {})
    if isinstance(optimizer, torch.optim.SGD):
        return state.get("momentum_buffer")
    if "step" not in state:
        return None
    step = float(state["step"]) if state["step"].device.type == "cpu" else state["step"].double()
    beta1, beta2 = group["betas"]
    second = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"] / (1 - beta2**step)
    first: Tensor = state["exp_avg"] / (1 - beta1**step)
    velocity: Tensor = first / (second.sqrt() + group["eps"])
    return velocity
