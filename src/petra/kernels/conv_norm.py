"""Convolutions followed by a batch norm, which skip the bias in training.

The bias has no effect there, because the norm subtracts the mean of the batch. Adding it, and summing its gradient to
zero, would take as long on a GPU as the norm itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from petra.kernels.fused_norm import hooked, norm_relu


class ConvNorm(nn.Sequential):
    """Layers in sequence, with each convolution, the batch norm after it and the ReLU after that fused if possible."""

    def forward(self, x: Tensor) -> Tensor:
        return _apply(list(self), x)

    def add_relu(self, added: Tensor, x: Tensor, relu: nn.Module) -> Tensor:
        """Compute relu(added + self(x)), fused with the last batch norm if possible."""
        if not torch.compiler.is_compiling() and not hooked(self):
            *before, conv, norm = self
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                return conv_norm_relu(conv, norm, _apply(before, x), relu, added)
        return relu(added + self(x))  # type: ignore[no-any-return]


def _apply(layers: list[nn.Module], x: Tensor) -> Tensor:
    while layers:
        layer = layers.pop(0)
        if isinstance(layer, nn.Conv2d) and layers and isinstance(layers[0], nn.BatchNorm2d):
            x = conv_norm_relu(layer, layers.pop(0), x, _pop_relu(layers))
        elif isinstance(layer, nn.BatchNorm2d):
            x = norm_relu(layer, x, _pop_relu(layers))
        else:
            x = layer(x)
    return x


def _pop_relu(layers: list[nn.Module]) -> nn.Module | None:
    """Remove and return the first of the layers if it is a ReLU."""
    return layers.pop(0) if layers and isinstance(layers[0], nn.ReLU) else None


def conv_norm_relu(
    conv: nn.Conv2d, norm: nn.Module, x: Tensor, relu: nn.Module | None = None, added: Tensor | None = None
) -> Tensor:
    """Compute relu(added + norm(conv(x))), without the bias of the convolution if batch statistics are used.

    `relu` and `added` may be None. The running mean includes the bias as usual, so checkpoints are not affected. The
    gradient of the bias is exactly zero, not zero up to rounding.
    """
    if conv.bias is None or not _bias_cancels(conv, norm):
        return norm_relu(norm, conv(x), relu, added=added)
    weight = _WeightWithBias.apply(conv.weight, conv.bias)  # type: ignore[no-untyped-call]
    return norm_relu(norm, conv._conv_forward(x, weight, None), relu, conv.bias, added)


def _bias_cancels(conv: nn.Module, norm: nn.Module) -> bool:
    """Return whether the norm cancels the bias, and no hook reads the values between or computes the weights."""
    return (
        type(conv) is nn.Conv2d  # a derived class may do something else
        and type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.momentum not in (None, 1.0)
        and not hooked(conv)
        and not hooked(norm)
    )


class _WeightWithBias(torch.autograd.Function):
    """Returns the weight and makes the bias part of the graph, so that it gets a gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.bias = bias.shape
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        (gradient,) = gradients
        return gradient, gradient.new_zeros(ctx.bias) if ctx.needs_input_grad[1] else None
