"""The base of optimizers whose updates can be captured in a CUDA graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]
"""A parameter group of an optimizer."""


class CapturableOptimizer(torch.optim.Optimizer, ABC):
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

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; the constructor does so too.

        Args:
            param_group: The parameters as `params`, and settings that differ from the defaults.

        Raises:
            ValueError: If a setting or a parameter does not fit.
        """
        super().add_param_group(param_group)
        try:
            self.check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def check_group(self, group: Group) -> None:
        """Check a new group, all of whose settings are filled in.

        Args:
            group: The group.

        Raises:
            ValueError: If a setting or a parameter does not fit.
        """
        check_settings(group)

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

    @abstractmethod
    def update(self, group: Group, parameters: list[Tensor]) -> None:
        """Update parameters of one group with the same dtype and device. Everything in it can be captured.

        Args:
            group: The group.
            parameters: The parameters; all have a gradient.
        """

    def refresh(self) -> None:
        """Do the work that is due after an update and that cannot be captured; by default there is none."""

    @abstractmethod
    def directions(self, group: Group) -> dict[Tensor, Tensor]:
        """Return the directions in which the next step would move parameters without new gradients.

        A step subtracts lr · direction. Weight decay is left out.

        Args:
            group: A group of the optimizer.

        Returns:
            The directions of the parameters that have been updated before.
        """

    def coasting_factor(self, group: Group) -> tuple[float, bool]:
        """Return how fast the directions of a group decay without new gradients.

        Args:
            group: A group of the optimizer.

        Returns:
            The factor per update, and True if the last step already included one such factor, as Nesterov momentum
            does.
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


def require_number(settings: Mapping[str, Any], name: str, below: float | None = None) -> None:
    """Raise ValueError unless a setting is a number from 0, and below a limit if there is one."""
    value = settings[name]
    fits = isinstance(value, Real) and 0 <= float(value) < (inf if below is None else below)
    require(fits, name, value, "give 0 or more" if below is None else f"give a value from 0 to below {below:g}")


def require_count(settings: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless a setting is a whole number from 1."""
    value = settings[name]
    require(isinstance(value, Integral) and int(value) >= 1, name, value, "give a whole number, 1 or more")


def check_settings(group: Group) -> None:
    """Raise ValueError for complex parameters, and for settings common to all optimizers that are out of range."""
    for parameter in group["params"]:
        require(not parameter.is_complex(), "the dtype of a parameter", parameter.dtype, "give real parameters")
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor):
        require(lr.numel() == 1 and not lr.is_complex() and bool(lr >= 0), "lr", lr, "give one number, 0 or more")
    else:
        require_number(group, "lr")
    require_number(group, "eps")
    require_number(group, "weight_decay")
    two = isinstance(betas, Sequence) and len(betas) == 2
    fit = two and all(isinstance(beta, Real) and 0 <= float(beta) < 1 for beta in betas)
    require(fit, "betas", betas, "give two values from 0 to below 1")
