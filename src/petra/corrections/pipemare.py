"""The two techniques of PipeMare (Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from petra.corrections.correction import Correction, Site, Weights


@dataclass(frozen=True)
class Reschedule(Correction):
    """Learning-rate rescheduling: update t of a stage uses lr/τ^p with p = 1 - min(t/K, 1), where τ > 1.

    Early on, when weights move fast, the rate is that which keeps an update with delay τ stable; after K updates it
    is the optimizer's own.
    """

    name = "reschedule"
    summary = "learning rate over τ at first, as it is after K updates (PipeMare, T1)"
    example = "reschedule:1000"

    updates: int

    def __post_init__(self) -> None:
        if not isinstance(self.updates, int) or self.updates < 1:
            raise ValueError(f"reschedule takes {self.updates} updates: give 1 or more, not parts, like {self.example}")

    def rate(self, site: Site) -> float:
        p = 1 - min(site.updates / self.updates, 1.0)
        return float(max(site.staleness, 1.0) ** -p)


@dataclass(frozen=True)
class Discrepancy(Correction):
    """Discrepancy correction: backward with θ - d·δ, a guess at the weights that the forward used d updates ago.

    δ ← γ·δ + (1 - γ)·(θ_new - θ_old) at every update, with γ = D^(1/τ). PipeMare has d = τ_fwd - τ_bkwd; here the
    backward uses current weights, τ_bkwd = 0. The sign is minus, for δ points from old weights to new ones.
    """

    name = "discrepancy"
    summary = "backward with weights extrapolated to those of the forward (PipeMare, T2)"
    example = "discrepancy:0.135"
    moves_backward = True
    needs_old = True

    decay: float = 0.135
    """D, about e^-2: what is left of a difference after τ updates."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"discrepancy has decay {self.decay}: give 0 or more and less than 1, like {self.example}")

    @torch.no_grad()
    def backward_weights(self, site: Site, delay: int) -> Weights | None:
        found = {p: p - delay * state["delta"] for p, state in site.state.items() if "delta" in state}
        return [found.get(p, p.data) for p in site.parameters] if found else None

    @torch.no_grad()
    def see_step(self, site: Site, old: Weights) -> None:
        gamma = self.decay ** (1 / site.staleness)
        for (parameter, _), before in zip(site.groups(), old, strict=True):
            state = site.state.setdefault(parameter, {})
            delta = state.setdefault("delta", torch.zeros_like(before))
            delta.mul_(gamma).add_((1 - gamma) * (parameter - before))
