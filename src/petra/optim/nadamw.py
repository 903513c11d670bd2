"""NAdam with decoupled weight decay (Dozat, 2016), whose step can be captured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from petra.optim.adamw import adam_directions, gradient, new_moments
from petra.optim.capturable import CapturableOptimizer, Group, alike, decay_weights, lr_tensor, require_number


class NAdamW(CapturableOptimizer):
    """`torch.optim.NAdam(decoupled_weight_decay=True)` that reads its learning rate from device memory.

    With μ_t = β₁·(1 - 0.96^(ψt)/2) and Π_t = μ_1·…·μ_t:

        m ← β₁·m + (1 - β₁)·g,   v ← β₂·v + (1 - β₂)·g²
        θ ← (1 - lr·λ)·θ - lr·((1 - μ_t)/(1 - Π_t)·g + μ_(t+1)/(1 - Π_(t+1))·m) / (√v̂ + ε)

    PyTorch's NAdam makes the host wait for the learning rate. States of both can be loaded into each other.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ.
        momentum_decay: ψ.

    Raises:
        ValueError: If a setting is out of range or a parameter is complex.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum_decay": momentum_decay,
        }
        super().__init__(params, defaults)

    def check_group(self, group: Group) -> None:
        super().check_group(group)
        require_number(group, "momentum_decay")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `NAdamW` or `torch.optim.NAdam`.

        Args:
            state_dict: What `state_dict` returned.
        """
        super().load_state_dict(state_dict)
        # PyTorch gives Π the dtype of its parameter, but updates keep it in float32.
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for i, parameter in zip(saved, own, strict=True):
            if state_dict["state"].get(i):
                product = state_dict["state"][i]["mu_product"]
                self.state[parameter]["mu_product"] = product.to(parameter.device, torch.float32, copy=True)

    def update(self, group: Group, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                one = torch.ones((), dtype=torch.float32, device=parameter.device)
                self.state[parameter].update(new_moments(parameter), mu_product=one)
        own = [self.state[p] for p in parameters]
        gradients = [gradient(p) for p in parameters]
        first, second = [state["exp_avg"] for state in own], [state["exp_avg_sq"] for state in own]
        steps, products = [state["step"] for state in own], [state["mu_product"] for state in own]
        (beta1, beta2), dtype, lr = group["betas"], parameters[0].dtype, lr_tensor(group, parameters[0].device)
        torch._foreach_add_(steps, 1)
        step = torch.stack(steps).double()
        mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** ((step + i) * group["momentum_decay"])) for i in (0, 1))
        torch._foreach_mul_(products, list(mu.to(products[0].dtype).unbind()))
        product = torch.stack(products).double()
        decay_weights(group, parameters, lr)
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        of_gradient = (-lr * (1 - mu) / (1 - product)).to(dtype)
        of_momentum = (-lr * mu_next / (1 - product * mu_next)).to(dtype)
        moves = torch._foreach_mul(gradients, list(of_gradient.unbind()))
        torch._foreach_add_(moves, torch._foreach_mul(first, list(of_momentum.unbind())))
        sizes = torch._foreach_div(second, list((1 - beta2**step).to(dtype).unbind()))
        torch._foreach_sqrt_(sizes)
        torch._foreach_add_(sizes, group["eps"])
        torch._foreach_addcdiv_(parameters, moves, sizes)

    def directions(self, group: Group) -> dict[Tensor, Tensor]:
        found: dict[Tensor, Tensor] = {}
        for parameters in alike(group["params"], lambda p: (p.device, p.dtype)):
            found |= adam_directions(group, parameters, self.state)
        return found

    def coasting_factor(self, group: Group) -> tuple[float, bool]:
        return float(group["betas"][0]), True
