"""Residual functions as views on blocks of other libraries."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from petra.conversion.kinds import Function, Norm, first


@dataclass(frozen=True)
class Untouched:
    """An argument that has to reach the block as the very object that it is, because the block writes into it."""

    value: Any


class View(nn.Module, ABC):
    """A residual function of a block. The block owns the parameters; nothing is copied."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, *, precision: torch.dtype | None = None, **named: Any) -> Tensor:
        """Evaluate at x, in the ``precision`` that the block is used to where streams have a higher one."""
        named = {name: value.value if isinstance(value, Untouched) else value for name, value in named.items()}
        return self.evaluate(x if precision is None else x.to(precision), named)

    @abstractmethod
    def evaluate(self, x: Tensor, named: Mapping[str, Any]) -> Tensor:
        """The function itself."""


class Branch(View):
    """A function of a known kind. It looks the block's parts up when it is called, so that they may be replaced.

    ``norm`` of the block ``owner`` comes before it.
    """

    def __init__(
        self, block: nn.Module, function: Function, owner: nn.Module | None = None, norm: Norm | None = None
    ) -> None:
        super().__init__(block)
        self.function = function
        self.owner = owner
        self.norm = norm

    def evaluate(self, x: Tensor, named: Mapping[str, Any]) -> Tensor:
        if self.norm is not None:
            x = self.norm(self.owner)(x)
        return self.function(self.block, x, named)


class Given(View):
    """A function that the user has made from the block."""

    def __init__(self, block: nn.Module, function: nn.Module) -> None:
        super().__init__(block)
        owned = {id(tensor) for tensor in (*block.parameters(), *block.buffers())}
        if any(id(tensor) not in owned for tensor in (*function.parameters(), *function.buffers())):
            raise ValueError(
                f"{type(function).__name__}, which split has made from {type(block).__name__}, has parameters or "
                "buffers of its own: make f and g from the parts of the block, or add the new part to the block first"
            )
        self.function = function
        parts = set(block.modules())
        self.added = [module for module in function.modules() if module not in parts]

    def evaluate(self, x: Tensor, named: Mapping[str, Any]) -> Tensor:
        for module in self.added:  # the block's own parts hear of train() and eval(); these do not
            module.training = self.block.training
        return first(self.function(x, **named))


def attend(module: nn.Module, x: Tensor, named: Mapping[str, Any]) -> Tensor:
    """Apply an attention module with those of the block's arguments that it takes.

    What it does not take has to be unset: a mask is never dropped.
    """
    parameters = inspect.signature(module.forward).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name, value in named.items():
            if name not in parameters and value is not None and value is not False:
                raise ValueError(f"{type(module).__name__} has no use for {name}, which its block was called with")
        named = {name: value for name, value in named.items() if name in parameters}
    return first(module(x, **named))
