"""Muon: momentum with its singular values made equal (Jordan et al., 2024; Liu et al., 2025)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from petra.optim.adamw import adam_directions, gradient, update_adamw
from petra.optim.capturable import (
    CapturableOptimizer,
    Group,
    alike,
    as_matrix,
    decay_weights,
    lr_tensor,
    require,
    require_count,
    require_number,
)
from petra.optim.newton_schulz import orthogonalize


class Muon(CapturableOptimizer):
    """Orthogonalised momentum for the matrices of some groups, AdamW for all other groups.

    In groups with `orthogonalize`, with gradient g, momentum buffer b and momentum m:

        b ← m·b + (1 - m)·g
        u = m·b + (1 - m)·g with Nesterov momentum, b otherwise
        θ ← (1 - lr·λ)·θ - lr·0.2·√max(rows, columns)·O(u)

    O is five Newton-Schulz iterations. They are batched over parameters of the same shape. The factor gives updates the
    size of AdamW's, so that its learning rate and weight decay can be kept (Liu et al., "Muon is Scalable for LLM
    Training", 2025). Weights of convolutions are matrices of shape (outputs, the rest).

    Orthogonalise the matrices inside a network. Embeddings, the first and last layer and vectors are for AdamW:
    `muon_groups` makes such groups.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate of all groups, on AdamW's scale.
        momentum: m.
        nesterov: Use Nesterov momentum.
        weight_decay: λ.
        betas: The betas of AdamW.
        eps: ε of AdamW.
        orthogonalize: Whether groups that do not say so are orthogonalised.
        steps: The number of Newton-Schulz iterations.
        dtype: The dtype of the iterations; None for bfloat16 on a GPU and the dtype of the parameters elsewhere.

    Raises:
        ValueError: If a setting is out of range, a parameter is complex, or one to be orthogonalised has fewer than two
            dimensions.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        orthogonalize: bool = True,
        steps: int = 5,
        dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "orthogonalize": orthogonalize,
            "steps": steps,
            "dtype": dtype,
        }
        super().__init__(params, defaults)

    def check_group(self, group: Group) -> None:
        super().check_group(group)
        require_number(group, "momentum", below=1)
        require_count(group, "steps")
        dtype = group["dtype"]
        real = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        require(dtype is None or real, "dtype", dtype, "give a floating-point dtype, or None")
        for parameter in group["params"] if group["orthogonalize"] else ():
            require(
                parameter.ndim > 1,
                "the shape of a parameter to orthogonalise",
                tuple(parameter.shape),
                'give petra.optim.muon_groups(…), or put it into a group with "orthogonalize": False',
            )

    def update(self, group: Group, parameters: list[Tensor]) -> None:
        if not group["orthogonalize"]:
            update_adamw(group, parameters, self.state)
            return
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(
                    parameter, memory_format=torch.preserve_format
                )
        m, lr = group["momentum"], lr_tensor(group, parameters[0].device)
        gradients = [gradient(p) for p in parameters]
        momenta = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - m)
        ahead = torch._foreach_lerp(gradients, momenta, m) if group["nesterov"] else momenta
        decay_weights(group, parameters, lr)
        for same, matrices in _batches(parameters, ahead):
            moves = _directions(group, matrices).mul_(-lr)
            torch._foreach_add_(same, [x.view_as(p) for x, p in zip(moves, same, strict=True)])

    def directions(self, group: Group) -> dict[Tensor, Tensor]:
        """Return the directions of the next step without new gradients.

        Zero gradients scale the momentum but do not turn it.

        Args:
            group: A group of the optimizer.

        Returns:
            0.2·√max(rows, columns)·O(b) for orthogonalised parameters, m̂/(√v̂ + ε) for those of AdamW.
        """
        found: dict[Tensor, Tensor] = {}
        for parameters in alike((p for p in group["params"] if self.state.get(p)), lambda p: (p.device, p.dtype)):
            if not group["orthogonalize"]:
                found |= adam_directions(group, parameters, self.state)
                continue
            for same, matrices in _batches(parameters, [self.state[p]["momentum_buffer"] for p in parameters]):
                steps = _directions(group, matrices)
                found |= {p: x.view_as(p) for p, x in zip(same, steps, strict=True)}
        return found

    def coasting_factor(self, group: Group) -> tuple[float, bool]:
        if not group["orthogonalize"]:
            return super().coasting_factor(group)
        return float(group["momentum"]), bool(group["nesterov"])


def _batches(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Iterable[tuple[list[Tensor], Tensor]]:
    """Yield the parameters of each shape with a batch of their values as matrices."""
    matrices = {p: as_matrix(x) for p, x in zip(parameters, values, strict=True)}
    for same in alike(parameters, lambda p: p.shape):
        yield same, torch.stack([matrices[p] for p in same])


def _directions(group: Group, matrices: Tensor) -> Tensor:
    """Return 0.2·√max(rows, columns)·O(matrices)."""
    scale = 0.2 * sqrt(max(matrices.shape[1:]))
    # Contiguous, because the iterations may return a transposed view, which could not take the shape of a convolution.
    return orthogonalize(matrices, group["steps"], dtype=group["dtype"]).contiguous().mul(scale)
