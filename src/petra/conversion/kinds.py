"""Kinds of residual blocks: how to tell them, and what their two residual functions are.

A block is told by its library, class and attributes; no library is imported. That its functions are
indeed what the block computes is then tried out on a small input (`try_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Function = Callable[[Any, Tensor, Mapping[str, Any]], Tensor]
"""A residual function of a block: of the block, its input, and what else the block was called with, by name."""

Norm = Callable[[Any], nn.Module]
"""Finds a normalisation layer in a block."""


@dataclass(frozen=True)
class Kind:
    """A class of blocks of a library.

    Without ``post`` a block computes a = x + f(x), y = a + g(a). With it, it is a post-norm block whose
    two norms stand behind the sums: a = norm1(x + f(x)), y = norm2(a + g(a)).
    """

    library: str
    classes: tuple[str, ...]
    attributes: tuple[str, ...]
    """What a block has to have; dots lead into its parts."""
    f: Function
    g: Function
    example: Callable[[Any], tuple[int, ...]]
    """The shape of a small input."""
    post: tuple[Norm, Norm] | None = None
    absent: tuple[str, ...] = ()
    """What a block may not have, such as a third residual function."""
    applies: Callable[[Any], bool] = lambda block: True
    """Any further condition."""

    def matches(self, block: nn.Module) -> bool:
        """Whether the block is of this kind, as far as its outside tells."""
        cls = type(block)
        return (
            cls.__module__.partition(".")[0] == self.library
            and cls.__name__ in self.classes
            and all(_has(block, path) for path in self.attributes)
            and not any(_has(block, path) for path in self.absent)
            and self.applies(block)
        )

    def compose(self, block: nn.Module, x: Tensor) -> Tensor:
        """The block's output from its two functions, put together as the block does."""
        a = x + self.f(block, x, {})
        if self.post is not None:
            a = self.post[0](block)(a)
        y = a + self.g(block, a, {})
        return y if self.post is None else self.post[1](block)(y)


def try_out(kind: Kind, block: nn.Module) -> bool:
    """Evaluate the block on a small input; refuse it if f and g do not make it up; tell whether it returns a tuple.

    Libraries change from version to version how their blocks are built and what they return, and do not
    always return what they announce. A tuple that is taken for a tensor would go unnoticed: its network
    would take the first sample of the batch for the batch.
    """
    weight = next(p for p in block.parameters() if p.is_floating_point())
    x = torch.randn(kind.example(block), generator=torch.Generator().manual_seed(0), device="cpu").to(weight)
    modes = [(module, module.training) for module in block.modules()]
    name = type(block).__name__
    try:
        block.eval()
        with torch.no_grad():
            output = block.forward(x)
            parts = kind.compose(block, x)
    except Exception as error:
        raise ValueError(
            f"{name} fails on an input of shape {tuple(x.shape)}, {x.dtype} on {x.device} ({error}): bring the network "
            "to the device and precision that it runs in before it is converted"
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode
    whole = first(output)
    tolerance = 1e-4 if x.dtype in (torch.float32, torch.float64) else 5e-2
    if not whole.is_meta and not (whole - parts).abs().max() <= tolerance * whole.abs().max():
        raise ValueError(
            f"{name} has the parts of a known block of {kind.library}, but computes something else than that with "
            "them: name its residual functions by split=lambda block: (f, g)"
        )
    return isinstance(output, tuple)


def first(output: Any) -> Tensor:
    """The tensor itself, or the first of a tuple."""
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
