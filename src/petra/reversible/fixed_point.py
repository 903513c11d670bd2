"""An additive coupling whose inverse is exact to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra.reversible.coupling import AdditiveCoupling
from petra.reversible.streams import Streams

_MANTISSA = {torch.float32: 24, torch.float64: 53}
_RANGE = 9
"""Values of streams are at least -2^9 and less than 2^9."""


@dataclass(frozen=True)
class FixedPointCoupling(AdditiveCoupling):
    """target ← target + function(source), with streams in fixed point and the function in floating point.

    RevNet, Section 3.2: floating-point sums are rounded, so subtracting what was added does not quite restore the
    original value. Here, streams and residuals are multiples of 2^-14 (2^-43 in float64) between -512 and 512. Inputs
    and residuals are rounded to such multiples and clamped to this range. These numbers fit into the mantissa of a
    float, so their sums are exact. A sum that leaves the range wraps around, as it would with integers. Gradients
    ignore rounding, clamping and wrapping.
    """

    def forward(self, streams: Streams) -> Streams:
        return super().forward((*(_rounded(x) for x in streams[:2]), *streams[2:]))

    def _change(self, target: Tensor, output: Tensor) -> Tensor:
        return _wrapped(target + _rounded(output.to(target.dtype)))

    def _restore(self, target: Tensor, output: Tensor) -> Tensor:
        return _wrapped(target - _rounded(output.to(target.dtype)))


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        limit = 2.0**_RANGE
        rounded = torch.round(x * scale).clamp_(-limit * scale, limit * scale - 1).div_(scale)
        return rounded.add_(x - x)  # turns infinities into NaN, and -0 into 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _rounded(x: Tensor) -> Tensor:
    """Return the nearest fixed-point numbers; fixed-point numbers stay as they are."""
    if x.dtype not in _MANTISSA:
        raise ValueError(
            f"streams are {x.dtype}, but a fixed-point coupling needs float32 or float64: convert the inputs of the "
            "reversible layers, or use autocast, which keeps streams in float32"
        )
    scale = 2.0 ** (_MANTISSA[x.dtype] - 1 - _RANGE)
    return _Round.apply(x, scale)  # type: ignore[no-any-return, no-untyped-call]


def _wrapped(x: Tensor) -> Tensor:
    """Wrap values around at the ends of the range, so that 2^9 becomes -2^9."""
    period = 2.0 ** (_RANGE + 1)
    return x - period * torch.floor(x / period + 0.5).detach()
