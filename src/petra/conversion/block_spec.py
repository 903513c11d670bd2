"""Specifications of residual blocks: how to recognise a block, and what its two residual functions are.

A block is recognised by its library, class and attributes; no library is imported. `check_block` then checks on a small
input that the functions together compute what the block computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Function = Callable[[Any, Tensor, Mapping[str, Any]], Tensor]
"""A residual function, called with the block, the input, and the other arguments of the block by name."""

Norm = Callable[[Any], nn.Module]
"""Returns a normalisation layer of a block."""


@dataclass(frozen=True)
class BlockSpec:
    """A type of residual block of a library.

    Without `post_norms`, a block computes a = x + f(x), y = a + g(a), or only y = x + f(x). With them, it is a
    post-norm block, which normalises the sums: a = norm1(x + f(x)), y = norm2(a + g(a)).
    """

    library: str
    """The name of the package."""
    classes: tuple[str, ...]
    """The names of the classes."""
    attributes: tuple[str, ...]
    """Attributes that a block must have, with dots for those of submodules."""
    f: Function
    """The first residual function."""
    g: Function | None
    """The second residual function; None for a block y = x + f(x) with only one."""
    example: Callable[[Any], tuple[int, ...]]
    """Returns the shape of a small input."""
    post_norms: tuple[Norm, Norm] | None = None
    """The two norms of a post-norm block."""
    absent: tuple[str, ...] = ()
    """Attributes that a block must not have, such as a third residual function."""
    arguments: Callable[[Any, Tensor], Mapping[str, Any]] = lambda block, x: {}
    """Returns arguments that the block cannot do without, for the small input."""
    applies: Callable[[Any], bool] = lambda block: True
    """A further condition."""

    def matches(self, block: nn.Module) -> bool:
        """Return whether the block is of this type, by its class and attributes."""
        cls = type(block)
        return (
            cls.__module__.partition(".")[0] == self.library
            and cls.__name__ in self.classes
            and all(_has(block, path) for path in self.attributes)
            and not any(_has(block, path) for path in self.absent)
            and self.applies(block)
        )

    def change(self, block: nn.Module, x: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        """Compute the residual of the whole block, or the output of a post-norm block."""
        if self.post_norms is not None:
            return self.compose(block, x, kwargs)
        first = self.f(block, x, kwargs)
        return first if self.g is None else first + self.g(block, x + first, kwargs)

    def compose(self, block: nn.Module, x: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        """Compute the block's output from its residual functions."""
        a = x + self.f(block, x, kwargs)
        if self.post_norms is not None:
            a = self.post_norms[0](block)(a)
        if self.g is None:
            return a
        y = a + self.g(block, a, kwargs)
        return y if self.post_norms is None else self.post_norms[1](block)(y)


def check_block(spec: BlockSpec, block: nn.Module) -> bool:
    """Check on a small input that f and g make up the block, and return whether the block returns a tuple.

    Libraries change the structure and the return type of their blocks between versions, and type annotations are not
    always right. If a network expects a tuple and gets a tensor, there is no error: it uses the first sample as the
    batch.
    """
    weight = next(p for p in block.parameters() if p.is_floating_point())
    x = torch.randn(spec.example(block), generator=torch.Generator().manual_seed(0), device="cpu").to(weight)
    modes = [(module, module.training) for module in block.modules()]
    name = type(block).__name__
    try:
        block.eval()
        with torch.no_grad():
            kwargs = spec.arguments(block, x)
            output = block.forward(x, **kwargs)
            composed = spec.compose(block, x, kwargs)
    except Exception as error:
        raise ValueError(
            f"{name} fails on an input of shape {tuple(x.shape)}, {x.dtype} on {x.device} ({error}): move the network "
            "to the device and dtype that it is used with before converting it"
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode
    expected = first_tensor(output)
    tolerance = 1e-4 if x.dtype in (torch.float32, torch.float64) else 5e-2
    if not expected.is_meta and not (expected - composed).abs().max() <= tolerance * expected.abs().max():
        raise ValueError(
            f"{name} has the submodules of a known block of {spec.library}, but computes something else with them: "
            "give its residual functions with split=lambda block: (f, g)"
        )
    return isinstance(output, tuple)


def first_tensor(output: Any) -> Tensor:
    """Return the tensor itself, or the first one of a tuple."""
    found = output[0] if isinstance(output, tuple) else output
    assert isinstance(found, Tensor)
    return found


def _has(block: nn.Module, path: str) -> bool:
    found: Any = block
    for name in path.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True
