"""AdamW for the parameters that Muon and SOAP do not treat as matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from petra.optim.capturable import Group


def update_adamw(group: Group, parameters: list[Tensor], states: dict[Any, Any]) -> None:
    """Update parameters as `torch.optim.AdamW(fused=True)` does, in one kernel.

    Args:
        group: A group with lr, betas, eps and weight_decay.
        parameters: Its parameters; all have a gradient, the same dtype and the same device.
        states: The state of the optimizer.
    """
    if not parameters:
        return
    for parameter in parameters:
        if not states[parameter]:
            states[parameter].update(new_moments(parameter))
    own = [states[p] for p in parameters]
    fused_adamw(
        group,
        parameters,
        [gradient(p) for p in parameters],
        [state["exp_avg"] for state in own],
        [state["exp_avg_sq"] for state in own],
        [state["step"] for state in own],
    )


def fused_adamw(
    group: Group,
    parameters: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Update parameters, moments and counts of steps in one kernel.

    Args:
        group: A group with lr, betas, eps and weight_decay.
        parameters: The parameters.
        gradients: Their gradients, with the same dtype and memory layout.
        first: Their first moments, likewise.
        second: Their second moments, likewise.
        steps: Their counts of steps.
    """
    beta1, beta2 = group["betas"]
    adamw(
        parameters,
        gradients,
        first,
        second,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def new_moments(parameter: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the initial state of Adam, with the count of steps on the device.

    Args:
        parameter: The parameter.
        dtype: The dtype of the moments; None for that of the parameter.

    Returns:
        The state.
    """
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
    }


def adam_directions(group: Group, parameters: list[Tensor], states: dict[Any, Any]) -> dict[Tensor, Tensor]:
    """Return m̂/(√v̂ + ε) of the parameters that have been updated before.

    Args:
        group: A group with betas and eps.
        parameters: Its parameters.
        states: The state of the optimizer.

    Returns:
        The directions.
    """
    known = [p for p in parameters if states.get(p)]
    if not known:
        return {}
    first, second = (
        torch._foreach_div([states[p][key].to(p.dtype) for p in known], _corrections(beta, known, states))
        for key, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True)
    )
    torch._foreach_sqrt_(second)
    torch._foreach_add_(second, group["eps"])
    torch._foreach_div_(first, second)
    return dict(zip(known, first, strict=True))


def _corrections(beta: float, parameters: list[Tensor], states: dict[Any, Any]) -> list[Tensor]:
    """Return 1 - β^t for each parameter, computed in float64."""
    steps = torch.stack([states[p]["step"] for p in parameters]).double()
    return list((1 - beta**steps).unbind())


def gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one."""
    assert parameter.grad is not None
    return parameter.grad
