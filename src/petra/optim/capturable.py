"""The base of optimizers whose updates can be captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]
"""A parameter group of an optimizer."""


class CapturableOptimizer(torch.optim.Optimizer):
    """An optimizer whose update can be captured.

    Nothing that the host does in `step` depends on the number of the step. The learning rate of a group is a number,
    or a tensor that is read on the device; both give the same bits if the number is a float32. Counts of steps are
    tensors on the device of their parameter. State tensors are changed in place and keep their addresses.

    Work that cannot be captured, such as a decomposition, belongs in `refresh`.

    Args:
        params: The parameters, or groups of them.
        defaults: The settings of groups that do not give their own.
    """

    refreshes_itself: bool = True
    """False if the caller calls `refresh` after each step, because the step itself runs inside a CUDA graph."""

    def __init__(self, params: Iterable[Any], defaults: Mapping[str, Any]) -> None:
        # PyTorch keeps the counts of steps of such groups on the device when it loads a state.
        super().__init__(params, {**defaults, "capturable": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the loss again; seldom needed.

        Returns:
            The loss of the closure, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in with_gradient):
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients: use dense ones")
            for parameters in alike(with_gradient, lambda p: (p.device, p.dtype)):
                self.update(group, parameters)
        if self.refreshes_itself:
            self.refresh()
        return loss

    def update(self, group: Group, parameters: list[Tensor]) -> None:
        """Update parameters of one group with the same dtype and device. Everything in it can be captured.

        Args:
            group: The group.
            parameters: The parameters; all have a gradient.
        """
        raise NotImplementedError

    def refresh(self) -> None:
        """Do the work that is due after an update and that cannot be captured; by default there is none."""

    def directions(self, group: Group) -> dict[Tensor, Tensor]:
        """Return the directions in which the next step would move parameters without new gradients.

        A step moves a parameter by the learning rate times its direction, against its sign. Weight decay is left out.

        Args:
            group: A group of the optimizer.

        Returns:
            The directions of the parameters that have been updated before.
        """
        raise NotImplementedError

    def coasting_factor(self, group: Group) -> tuple[float, bool]:
        """Return how fast the directions of a group decay without new gradients.

        Args:
            group: A group of the optimizer.

        Returns:
            The factor per update, and whether the first of these updates is already behind, as with Nesterov momentum.
        """
        return float(group["betas"][0]), False


def alike(parameters: Iterable[Tensor], kind: Callable[[Tensor], Any]) -> Iterator[list[Tensor]]:
    """Group parameters.

    Args:
        parameters: The parameters.
        kind: Returns a hashable value.

    Yields:
        The parameters of each kind, in their order.
    """
    found: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(kind(parameter), []).append(parameter)
    yield from found.values()


def lr_tensor(group: Group, device: torch.device) -> Tensor:
    """Return the learning rate of a group as a float64 on the device; a number takes a kernel, not a copy."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        return lr.to(device, torch.float64)
    return torch.full((), lr, dtype=torch.float64, device=device)


def decay_weights(group: Group, parameters: list[Tensor], lr: Tensor) -> None:
    """Apply decoupled weight decay, θ ← (1 - lr·λ)·θ."""
    if group["weight_decay"]:
        torch._foreach_mul_(parameters, (1 - lr * group["weight_decay"]).to(parameters[0].dtype))


def as_matrix(tensor: Tensor) -> Tensor:
    """Flatten the weights of a convolution to (outputs, the rest)."""
    return tensor if tensor.ndim == 2 else tensor.reshape(len(tensor), -1)


def require(condition: bool, name: str, value: object, remedy: str) -> None:
    """Raise ValueError about a setting unless the condition holds."""
    if not condition:
        raise ValueError(f"{name} is {value!r}: {remedy}")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for learning rates, betas, epsilons and weight decays that make no sense."""
    require(float(settings["lr"]) >= 0, "lr", settings["lr"], "give 0 or more")
    require(settings["eps"] >= 0, "eps", settings["eps"], "give 0 or more")
    require(settings["weight_decay"] >= 0, "weight_decay", settings["weight_decay"], "give 0 or more")
    require(
        all(0 <= beta < 1 for beta in settings["betas"]), "betas", settings["betas"], "give values from 0 to below 1"
    )
