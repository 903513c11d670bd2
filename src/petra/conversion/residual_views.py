"""Residual functions as views on blocks of other libraries."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from petra.conversion.block_spec import Function, Norm, first_tensor


@dataclass(frozen=True)
class ByReference:
    """An argument that must reach the block as the same object, because the block writes into it."""

    value: Any


class ResidualView(nn.Module, ABC):
    """A residual function of a block. The block owns the parameters; nothing is copied.

    Args:
        block: The block.
        parts: The modules that the view has as submodules: those whose parameters the function may use.
    """

    def __init__(self, block: nn.Module, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        # In a tuple, because a part of the block can belong to another view: the last norm of a post-norm block.
        self._block = (block,)

    @property
    def block(self) -> nn.Module:
        """The block."""
        return self._block[0]

    def forward(self, x: Tensor, *, precision: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        """Evaluate the function at x, cast to `precision`, the dtype of the block, if the streams have a higher one."""
        kwargs = {name: value.value if isinstance(value, ByReference) else value for name, value in kwargs.items()}
        return self.evaluate(x if precision is None else x.to(precision), kwargs)

    @abstractmethod
    def evaluate(self, x: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        """Evaluate the function at x."""


class KnownResidual(ResidualView):
    """A residual function of a known block, preceded by the `norm` of the block `owner` if these are given.

    It looks up the submodules of the block in every call, so they may be replaced. `last_norm` is the norm at the end
    of a post-norm block, which precedes the function of the next block and is used there.
    """

    def __init__(
        self,
        block: nn.Module,
        function: Function,
        owner: nn.Module | None = None,
        norm: Norm | None = None,
        last_norm: Norm | None = None,
    ) -> None:
        parts = [block] if last_norm is None else modules_without(block, last_norm(block))
        super().__init__(block, parts if norm is None or owner is block else [*parts, norm(owner)])
        self.function = function
        self._owner = (owner,)
        self.norm = norm

    def evaluate(self, x: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        if self.norm is not None:
            x = self.norm(self._owner[0])(x)
        return self.function(self.block, x, kwargs)


class UserResidual(ResidualView):
    """A residual function that the user's `split` made from the block."""

    def __init__(self, block: nn.Module, function: nn.Module) -> None:
        super().__init__(block, [block])
        owned = {id(tensor) for tensor in (*block.parameters(), *block.buffers())}
        if any(id(tensor) not in owned for tensor in (*function.parameters(), *function.buffers())):
            raise ValueError(
                f"{type(function).__name__}, which split made from {type(block).__name__}, has parameters or buffers "
                "that the block does not have: make f and g from submodules of the block, or add the new ones to the "
                "block first"
            )
        self.function = function
        parts = set(block.modules())
        self.added = [module for module in function.modules() if module not in parts]

    def evaluate(self, x: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        for module in self.added:  # train() and eval() of the network do not reach these
            module.training = self.block.training
        return first_tensor(self.function(x, **kwargs))


class SplitChange(nn.Module):
    """The residual f(x) + g(x + f(x)) of a block, or f(x), from the residual functions that `split` made."""

    def __init__(self, f: UserResidual, g: UserResidual | None = None) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def forward(self, block: nn.Module, x: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        """Compute the residual.

        Args:
            block: The block, which the functions know.
            x: The input.
            kwargs: The other arguments of the block.

        Returns:
            The residual.
        """
        first: Tensor = self.f(x, **kwargs)
        return first if self.g is None else first + self.g(x + first, **kwargs)


def modules_without(module: nn.Module, other: nn.Module) -> list[nn.Module]:
    """Return the largest modules inside `module` that do not contain `other`, which together hold all the rest."""
    if other not in set(module.modules()):
        return [module]
    if module is other:
        return []
    assert not module._parameters, f"{type(module).__name__} has parameters besides those of its submodules"
    return [part for child in module.children() for part in modules_without(child, other)]


def attend(module: nn.Module, x: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """Apply an attention module with those of the block's arguments that it takes.

    Raises `ValueError` if an argument that it does not take is set, so that a mask is never dropped.
    """
    parameters = inspect.signature(module.forward).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name, value in kwargs.items():
            if name not in parameters and value is not None and value is not False:
                raise ValueError(
                    f"{name} was given to a block, but its {type(module).__name__} does not take it: leave it out"
                )
        kwargs = {name: value for name, value in kwargs.items() if name in parameters}
    return first_tensor(module(x, **kwargs))
