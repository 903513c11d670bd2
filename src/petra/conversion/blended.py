"""The coupling of converted networks that start from the function they had.

With h(x) = x + r(x) the function of a block, the original network computes x_{n+1} = x_n + r_n(x_n). A segment of
blended blocks computes x_1 = x_0 + r_0(x_0) and then

    x_{n+1} = γ x_{n-1} + (1 - γ) x_n + (1 + γ) r_n(x_n),    inverted by    x_{n-1} = (x_{n+1} - …) / γ

which is the original network for γ = 0 and the explicit midpoint rule for γ = 1. It changes the original function by
γ (r_n - (x_n - x_{n-1})), of first order in γ and small if residuals change little from block to block. With random
signs of γ, this is zero on average (BDIA; Zhang et al., "On Exact Bit-level Reversible Transformers Without Changing
Architectures", 2024).

The inverse multiplies rounding errors by 1/γ for each block, so streams are in float64, while blocks compute in their
own dtype. BDIA stores the bits that a division loses instead.

A post-norm block y = h(x) has no path around its norms. With the formula above, its streams would grow, so

    x_{n+1} = γ x_{n-1} + (1 - γ) h_n(x_n)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

import torch
from torch import Tensor, nn

from petra.conversion.residual_views import ResidualView
from petra.reversible import TwoStreamCoupling
from petra.reversible.streams import Gradients, Streams

Change = Callable[[nn.Module, Tensor, Mapping[str, Any]], Tensor]
"""Returns the residual r(x) of a block, or the output h(x) of a post-norm block."""

_DEFAULTS = (0.25, 0.5, 0.75, 0.875, 1.0)
_EXACT_BITS = 30
"""The bits that reconstruction may lose with powers of two, whose products and quotients are exact in float64 while
bits are left."""
_ROUNDED_BITS = 18
"""The bits that it may lose with other values. Once a float64 rounding error changes the input of a block, which is
rounded to float32, the error is as large as rounding errors of float32, and grows from there."""


@dataclass
class Blend:
    """The weight γ of a converted network, which its blocks share."""

    value: float
    """The absolute value of γ."""
    random: bool
    """True for random signs in training mode, and the original function in evaluation mode."""
    automatic: bool = False
    """True if the value is raised to what the longest segment needs."""


class BlendedStep(ResidualView):
    """Returns γ and (1 - γ) x + (1 + γ) r(x) of a block.

    Args:
        block: The block.
        parts: The modules that it uses.
        change: The function of the block.
        blend: The weight of the network.
        first: True for the first block of a segment.
        post_norm: True if `change` returns the output of a post-norm block.
    """

    def __init__(
        self,
        block: nn.Module,
        parts: Sequence[nn.Module],
        change: Change,
        blend: Blend,
        *,
        first: bool,
        post_norm: bool,
    ) -> None:
        super().__init__(block, parts)
        self.change = change
        self.blend = blend
        self.first = first
        self.post_norm = post_norm

    def forward(self, x: Tensor, *, precision: torch.dtype | None = None, **kwargs: Any) -> Any:
        gamma = self._gamma(x)  # before the block draws random numbers, and again so in the inverse
        change = super().forward(x, precision=precision, **kwargs).to(x.dtype)
        if self.first:  # the other stream is x as well
            return gamma, change - x if self.post_norm else change
        if self.post_norm:
            return gamma, (1 - gamma) * change
        return gamma, (1 - gamma) * x + (1 + gamma) * change

    def evaluate(self, x: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        return self.change(self.block, x, kwargs)

    def _gamma(self, x: Tensor) -> Tensor | float:
        if self.first:
            return 1.0
        if not self.blend.random:
            return self.blend.value
        if not self.block.training:
            return 0.0
        signs = torch.randint(0, 2, (len(x), *(1,) * (x.ndim - 1)), device=x.device) * 2 - 1
        return self.blend.value * signs.to(x.dtype)


@dataclass(frozen=True)
class BlendedCoupling(TwoStreamCoupling):
    """target ← γ · target + shift, with (γ, shift) = function(source)."""

    def _change(self, target: Tensor, output: tuple[Tensor | float, Tensor]) -> Tensor:
        gamma, shift = output
        return target * gamma + shift

    def _restore(self, target: Tensor, output: tuple[Tensor | float, Tensor]) -> Tensor:
        gamma, shift = output
        if isinstance(gamma, float) and gamma == 0:
            raise ValueError(
                "a network with coupling='bdia' computes its original function in evaluation mode, which is not "
                "invertible: call train() before training it"
            )
        return (target - shift) / gamma

    def _target_vjp(
        self, target: Tensor, output: tuple[Tensor | float, Tensor], gradient: Tensor
    ) -> tuple[Tensor, Streams, Gradients]:
        gamma, shift = output
        return gradient * gamma, (shift,), (gradient,)

    def _check(self, output: Any, target: Tensor) -> None:
        super()._check(output[1], target)


def blended_split(x: Tensor) -> Streams:
    """Return two streams x in float64."""
    return x.double(), x.double()


def blended_join(x: Tensor, before: Tensor) -> Tensor:
    """Return the output of the last block."""
    return x


def default_blend(blocks: int) -> float:
    """Return the blend for a segment of this many blocks: the smallest of a few that can be inverted."""
    return next(blend for blend in _DEFAULTS if _lost_bits(blend, blocks) <= _limit(blend))


def check_blend(blend: float, blocks: int) -> None:
    """Raise ValueError unless a segment of this many blocks can be inverted in float64."""
    if isinstance(blend, bool) or not isinstance(blend, int | float) or not 0 < blend <= 1:
        raise ValueError(f"blend is {blend!r}: give a number above 0, which is the original network, and up to 1")
    lost = _lost_bits(blend, blocks)
    if lost > _limit(blend):
        raise ValueError(
            f"blend is {blend}, but reconstruction through {blocks} blocks would lose {lost:.0f} bits of precision, "
            f"and at most {_limit(blend)} are allowed: give {default_blend(blocks)}"
        )


def _lost_bits(blend: float, blocks: int) -> float:
    return (blocks - 1) * -log2(blend)


def _limit(blend: float) -> int:
    return _EXACT_BITS if log2(blend).is_integer() else _ROUNDED_BITS
