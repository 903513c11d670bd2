"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners (Vyas et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from petra.optim.adamw import adam_directions, gradient, new_moments, update_adamw
from petra.optim.capturable import (
    CapturableOptimizer,
    Group,
    alike,
    as_matrix,
    decay_weights,
    lr_tensor,
    require_count,
)
from petra.optim.eigenbasis import eigenbasis, improve_basis

SIDES = ("left", "right")


class SOAP(CapturableOptimizer):
    """Adam in a slowly rotating basis, in which the gradients of a matrix are nearly independent of each other.

    For a matrix with gradient G, eigenvectors Q_L of L and Q_R of R:

        M ← β₁·M + (1 - β₁)·G
        V ← β₂·V + (1 - β₂)·(Q_LᵀGQ_R)²
        θ ← (1 - lr·λ)·θ - lr·Q_L·(Q_LᵀM̂Q_R / (√V̂ + ε))·Q_Rᵀ
        L ← β₂·L + (1 - β₂)·GGᵀ,   R ← β₂·R + (1 - β₂)·GᵀG

    M is kept in the space of the weights, so a new basis does not affect it; V is kept in the basis. The first update
    of a matrix only initialises L, R and their eigenvectors, as in the paper: in a basis made from the same gradient,
    all entries off the diagonal are rounding errors, which Adam would scale to full size. After every
    `precondition_frequency` further updates, `refresh` improves the basis by one step of power iteration and a QR
    decomposition. Updates and decompositions are batched over matrices of the same shape.

    Weights of convolutions are matrices of shape (outputs, the rest). A side with more than `max_precondition_dim`
    entries is not rotated. Parameters without a side to rotate, such as vectors, are updated by AdamW.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ.
        precondition_frequency: The number of updates between two changes of the basis.
        max_precondition_dim: The size of the largest L and R.

    Raises:
        ValueError: If a setting is out of range or a parameter is complex.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 4096,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_precondition_dim": max_precondition_dim,
        }
        super().__init__(params, defaults)

    def check_group(self, group: Group) -> None:
        super().check_group(group)
        require_count(group, "precondition_frequency")
        require_count(group, "max_precondition_dim")

    def update(self, group: Group, parameters: list[Tensor]) -> None:
        rotated = [p for p in parameters if _sides(group, p)]
        update_adamw(group, [p for p in parameters if not _sides(group, p)], self.state)
        for same in alike(rotated, lambda p: (p.shape, bool(self.state.get(p)))):
            gradients = torch.stack([as_matrix(gradient(p)) for p in same])
            if self.state[same[0]]:
                self._step(group, same, gradients)
            else:
                for parameter in same:
                    self.state[parameter].update(_new_state(group, parameter))
            self._accumulate(group, same, gradients)

    def _step(self, group: Group, same: list[Tensor], gradients: Tensor) -> None:
        """Update matrices of the same shape."""
        (beta1, beta2), lr = group["betas"], lr_tensor(group, gradients.device)
        torch._foreach_add_(self._states("step", same), 1)
        torch._foreach_lerp_(self._states("exp_avg", same), [gradient(p) for p in same], 1 - beta1)
        second, seen = self._states("exp_avg_sq", same), list(self._rotate(group, same, gradients).unbind())
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, seen, seen, 1 - beta2)
        decay_weights(group, same, lr)
        moves = self._directions(group, same).mul_(-lr)
        torch._foreach_add_(same, [x.view_as(p) for x, p in zip(moves, same, strict=True)])

    def _accumulate(self, group: Group, same: list[Tensor], gradients: Tensor) -> None:
        """Add gradients to the preconditioners."""
        for side in _sides(group, same[0]):
            products = torch.bmm(gradients, gradients.mT) if side == "left" else torch.bmm(gradients.mT, gradients)
            torch._foreach_lerp_(self._states(side, same), list(products.unbind()), 1 - group["betas"][1])

    @torch.no_grad()
    def refresh(self) -> None:
        """Count an update of every matrix with a gradient, and improve its basis if that is due."""
        due: dict[Any, list[tuple[Tensor, str]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                if parameter.grad is None or "updates" not in state:
                    continue
                state["updates"] += 1
                first, late = divmod(state["updates"] - 1, group["precondition_frequency"])
                for side in _sides(group, parameter) if not late else ():
                    kind = (state[side].shape, state[side].dtype, state[side].device, first == 0)
                    due.setdefault(kind, []).append((parameter, side))
        for (*_, new), found in due.items():
            self._improve(found, new)

    def _improve(self, found: list[tuple[Tensor, str]], new: bool) -> None:
        """Compute the eigenvectors of sides of the same size, or improve them."""
        matrices = torch.stack([self.state[p][side] for p, side in found])
        bases = [self.state[p][f"{side}_basis"] for p, side in found]
        if new:
            torch._foreach_copy_(bases, list(eigenbasis(matrices).unbind()))
            return
        better, orders = improve_basis(matrices, torch.stack(bases))
        torch._foreach_copy_(bases, list(better.unbind()))
        for (parameter, side), order in zip(found, orders, strict=True):
            second = self.state[parameter]["exp_avg_sq"]
            second.copy_(second.index_select(SIDES.index(side), order))

    def directions(self, group: Group) -> dict[Tensor, Tensor]:
        """Return the directions of the next step without new gradients.

        Args:
            group: A group of the optimizer.

        Returns:
            Q_L·(Q_LᵀM̂Q_R / (√V̂ + ε))·Q_Rᵀ for matrices, m̂/(√v̂ + ε) for vectors; none before the first step.
        """
        plain = [p for p in group["params"] if not _sides(group, p)]
        # The first update of a matrix makes no step.
        moved = [p for p in group["params"] if self.state.get(p, {}).get("updates", 0) > 1]
        found: dict[Tensor, Tensor] = {}
        for parameters in alike(plain, lambda p: (p.device, p.dtype)):
            found |= adam_directions(group, parameters, self.state)
        for same in alike(moved, lambda p: (p.device, p.dtype, p.shape)):
            found |= {p: x.view_as(p) for p, x in zip(same, self._directions(group, same), strict=True)}
        return found

    def _directions(self, group: Group, same: list[Tensor]) -> Tensor:
        """Return Q_L·(Q_LᵀM̂Q_R / (√V̂ + ε))·Q_Rᵀ of matrices of the same shape."""
        first = self._rotate(group, same, torch.stack([as_matrix(m) for m in self._states("exp_avg", same)]))
        second = torch.stack(self._states("exp_avg_sq", same))
        steps = torch.stack(self._states("step", same)).double().view(-1, 1, 1)
        unbiased = [(1 - beta**steps).to(first.dtype) for beta in group["betas"]]
        adam = (first / unbiased[0]) / ((second / unbiased[1]).sqrt() + group["eps"])
        return self._rotate(group, same, adam, back=True).contiguous()

    def _rotate(self, group: Group, same: list[Tensor], matrices: Tensor, back: bool = False) -> Tensor:
        """Return Q_Lᵀ·X·Q_R, or Q_L·X·Q_Rᵀ for the way back; sides without a basis stay as they are."""
        for side in _sides(group, same[0]):
            basis = torch.stack(self._states(f"{side}_basis", same))
            if side == "left":
                matrices = torch.bmm(basis if back else basis.mT, matrices)
            else:
                matrices = torch.bmm(matrices, basis.mT if back else basis)
        return matrices

    def _states(self, key: str, parameters: list[Tensor]) -> list[Tensor]:
        return [self.state[p][key] for p in parameters]


def _sides(group: Group, parameter: Tensor) -> list[str]:
    """Return the sides of a parameter that are rotated."""
    if parameter.ndim < 2:
        return []
    sizes = (len(parameter), parameter.numel() // max(1, len(parameter)))
    return [side for side, size in zip(SIDES, sizes, strict=True) if 1 < size <= group["max_precondition_dim"]]


def _new_state(group: Group, parameter: Tensor) -> dict[str, Any]:
    state: dict[str, Any] = new_moments(parameter)
    shape = as_matrix(parameter).shape
    state["exp_avg_sq"] = parameter.new_zeros(shape)
    for side in _sides(group, parameter):
        size = shape[SIDES.index(side)]
        state[side] = parameter.new_zeros(size, size)
        state[f"{side}_basis"] = parameter.new_zeros(size, size)
    state["updates"] = 0  # on the host, which decides when the basis is due
    return state
