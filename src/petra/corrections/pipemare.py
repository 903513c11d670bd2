"""The two techniques of PipeMare (Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from petra.corrections.correction import Correction, StageContext, Weights


@dataclass(frozen=True)
class Reschedule(Correction):
    """Learning-rate rescheduling: update t of a stage uses lr/τ^p with p = 1 - min(t/K, 1), where τ > 1.

    At first, when weights change fast, the learning rate is one that is stable with a delay of τ. After K updates it is
    that of the optimizer.

    Experimental. Measured: RevNet-18 on CIFAR-10, ten stages, k = 1, 30 epochs, one seed: 91.6 % with
    `reschedule:3910`, and 91.6 % without corrections.
    """

    name = "reschedule"
    summary = "learning rate divided by τ at first, unchanged after K updates (PipeMare, T1)"
    example = "reschedule:1000"
    experimental = True

    updates: int
    """K."""

    def __post_init__(self) -> None:
        if not isinstance(self.updates, int) or self.updates < 1:
            raise ValueError(f"reschedule has {self.updates} updates: give an integer, 1 or more, like {self.example}")

    def lr_factor(self, context: StageContext) -> float:
        p = 1 - min(context.updates / self.updates, 1.0)
        return float(max(context.staleness, 1.0) ** -p)


@dataclass(frozen=True)
class Discrepancy(Correction):
    """Discrepancy correction: backward with θ - d·δ, an estimate of the weights that the forward used d updates ago.

    δ ← γ·δ + (1 - γ)·(θ_new - θ_old) at every update, with γ = D^(1/τ). PipeMare has d = τ_fwd - τ_bkwd. Here the
    backward uses current weights, so τ_bkwd = 0. The sign is minus because δ points from old weights to new ones.

    Experimental. Measured: RevNet-18 on CIFAR-10, ten stages, k = 1, 30 epochs, one seed: 91.4 % with
    `discrepancy:0.135`, and 91.6 % without corrections.
    """

    name = "discrepancy"
    summary = "backward with weights extrapolated back to those of the forward (PipeMare, T2)"
    example = "discrepancy:0.135"
    experimental = True
    changes_backward_weights = True
    needs_old_weights = True

    decay: float = 0.135
    """D, about e^-2: the fraction of a difference that is left after τ updates."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"discrepancy has decay {self.decay}: give 0 or more and less than 1, like {self.example}")

    @torch.no_grad()
    def backward_weights(self, context: StageContext, delay: int) -> Weights | None:
        found = {p: p - delay * state["delta"] for p, state in context.state.items() if "delta" in state}
        return [found.get(p, p.data) for p in context.parameters] if found else None

    @torch.no_grad()
    def after_step(self, context: StageContext, old: Weights) -> None:
        gamma = self.decay ** (1 / context.staleness)
        for (parameter, _), before in zip(context.trained_parameters(), old, strict=True):
            state = context.state.setdefault(parameter, {})
            delta = state.setdefault("delta", torch.zeros_like(before))
            delta.mul_(gamma).add_((1 - gamma) * (parameter - before))
