"""Gradient shrinking (Zhuang et al., "Fully Decoupled Neural Network Learning Using Delayed Gradients", 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from petra.corrections.correction import Correction, Site


@dataclass(frozen=True)
class Shrink(Correction):
    """Gradients of a stage times β^τ: the older they are, the less they count."""

    name = "shrink"
    summary = "gradients times β^τ (gradient shrinking, Zhuang et al.)"
    example = "shrink:0.9"

    beta: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.beta <= 1:
            raise ValueError(f"shrink has β {self.beta}: give more than 0 and at most 1, like {self.example}")

    @torch.no_grad()
    def change_gradients(self, site: Site) -> None:
        for parameter, _ in site.groups():
            if parameter.grad is not None:
                parameter.grad.mul_(self.beta**site.staleness)
