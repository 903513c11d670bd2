"""A bias before batch norm, which has no effect in training: the norm takes the mean of the batch away.

Adding it, and summing its gradient up to zero, would take as long on a GPU as the norm itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ConvNorm(nn.Sequential):
    """Layers one after the other, where a convolution comes right before its batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        layers = iter(self)
        for layer in layers:
            x = normalised(layer, next(layers), x) if isinstance(layer, nn.Conv2d) else layer(x)
        return x


def normalised(conv: nn.Conv2d, norm: nn.Module, x: Tensor) -> Tensor:
    """norm(conv(x)), where batch statistics are used without the bias of the convolution.

    The running mean is that of before, with the bias, and so are weights in a checkpoint. The gradient of the bias is
    exactly zero, not zero up to rounding.
    """
    if conv.bias is None or not isinstance(norm, nn.BatchNorm2d) or not norm.training or norm.momentum in (None, 1.0):
        return norm(conv(x))  # type: ignore[no-any-return]
    if norm.running_mean is not None:  # of which the norm is about to keep a part of 1 - momentum
        # Through `data`, for autograd takes no notice of what a norm does to it either: other graphs may have saved it.
        norm.running_mean.data.add_(conv.bias.detach(), alpha=norm.momentum / (1 - norm.momentum))
    weight = _Unfelt.apply(conv.weight, conv.bias)  # type: ignore[no-untyped-call]
    return norm(conv._conv_forward(x, weight, None))  # type: ignore[no-any-return]


class _Unfelt(torch.autograd.Function):
    """The weight, which makes the bias a part of the graph: all parameters have a gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.bias = bias.shape
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        (gradient,) = gradients
        return gradient, gradient.new_zeros(ctx.bias) if ctx.needs_input_grad[1] else None
