"""Spike compensation (Kosson et al., "Pipelined Backpropagation at Scale", 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from petra.corrections.correction import Correction, StageContext, Weights


@dataclass(frozen=True)
class Spike(Correction):
    """Updates by lr·(a·v + b·g) instead of lr·v, with a = m^τ and b = (1 - m^τ)/(1 - m).

    A gradient that is τ updates late gets at once what momentum would have added up in the meantime. Nesterov momentum,
    lr·(m·v + g), is the case τ = 1, so with it the exponent is τ + 1.

    Experimental. Measured: RevNet-18 on CIFAR-10, ten stages, k = 1, 30 epochs, one seed: 91.5 %, and 91.2 % with
    `predict,spike`; 91.6 % without corrections.
    """

    name = "spike"
    summary = "a late gradient gets at once what momentum would have added (spike compensation, Kosson et al.)"
    example = "spike"
    experimental = True
    needs_old_weights = True
    replaces_step = True

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.SGD):
            raise ValueError(
                f"spike works with SGD with momentum, not with {type(optimizer).__name__}: leave spike out"
            )
        for group in optimizer.param_groups:
            if not 0 < group["momentum"] < 1 or group["dampening"]:
                raise ValueError(
                    f"spike needs a momentum between 0 and 1 without dampening, and SGD has momentum "
                    f"{group['momentum']} and dampening {group['dampening']}: change them, or leave spike out"
                )

    @torch.no_grad()
    def change_step(self, context: StageContext, old: Weights) -> None:
        for (parameter, group), before in zip(context.trained_parameters(), old, strict=True):
            if parameter.grad is None:
                continue
            m = group["momentum"]
            a = m ** (context.staleness + group["nesterov"])
            b = (1 - a) / (1 - m)
            gradient = -parameter.grad if group["maximize"] else parameter.grad
            if group["weight_decay"]:
                gradient = gradient + group["weight_decay"] * before
            velocity = context.optimizer.state[parameter]["momentum_buffer"]
            parameter.copy_(before - group["lr"] * (a * velocity + b * gradient))
