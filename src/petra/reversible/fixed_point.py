"""An additive coupling whose inverse returns the very same bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra.reversible.coupling import Additive
from petra.reversible.streams import Streams

_MANTISSA = {torch.float32: 24, torch.float64: 53}
_RANGE = 9
"""Streams lie between -2^9 and just below 2^9."""


@dataclass(frozen=True)
class FixedPoint(Additive):
    """target ← target + function(source), with streams in fixed point and the function in floating point.

    RevNet, Section 3.2: sums of floating-point numbers are rounded, so subtracting again what was added does not
    quite give what was there. Here streams are multiples of 2^-14 (of 2^-43 in float64) between -512 and 512, and so is
    what is added to them; inputs and residuals are rounded to that, and cut off at its ends. Numbers like these fill a
    float's mantissa and no more, so their sums are exact; a sum that leaves the range comes in again at its other end,
    as it would with integers. Gradients ignore all that.
    """

    def forward(self, streams: Streams) -> Streams:
        return super().forward((*(_on_grid(x) for x in streams[:2]), *streams[2:]))

    def _change(self, target: Tensor, found: Tensor) -> Tensor:
        return _wrapped(target + _on_grid(found.to(target.dtype)))

    def _restore(self, target: Tensor, found: Tensor) -> Tensor:
        return _wrapped(target - _on_grid(found.to(target.dtype)))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        limit = 2.0**_RANGE
        rounded = torch.round(x * scale).clamp_(-limit * scale, limit * scale - 1).div_(scale)
        return rounded.add_(x - x)  # what is not finite becomes NaN, and -0 becomes 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _on_grid(x: Tensor) -> Tensor:
    """The nearest number in fixed point; those that are in it stay as they are."""
    if x.dtype not in _MANTISSA:
        raise ValueError(f"streams are in {x.dtype}: fixed point wants float32 or float64 (autocast keeps them there)")
    scale = 2.0 ** (_MANTISSA[x.dtype] - 1 - _RANGE)
    return _Rounded.apply(x, scale)  # type: ignore[no-any-return, no-untyped-call]


def _wrapped(x: Tensor) -> Tensor:
    whole = 2.0 ** (_RANGE + 1)
    return x - whole * torch.floor(x / whole + 0.5).detach()  # 2^9 itself is the first to come in again
