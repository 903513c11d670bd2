"""A bias before batch norm, which has no effect in training: the norm takes the mean of the batch away.

Adding it, and summing its gradient up to zero, would take as long on a GPU as the norm itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from petra.models.fused_norm import hooked, norm_relu


class ConvNorm(nn.Sequential):
    """Layers one after the other; a convolution knows of the batch norm behind it, and that one of its ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return _through(list(self), x)

    def onto(self, added: Tensor, x: Tensor, relu: nn.Module) -> Tensor:
        """relu(added + self(x)), in which the last batch norm knows of the rest."""
        if not torch.compiler.is_compiling() and not hooked(self):
            *before, conv, norm = self
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                return normalised(conv, norm, _through(before, x), relu, added)
        return relu(added + self(x))  # type: ignore[no-any-return]


def _through(layers: list[nn.Module], x: Tensor) -> Tensor:
    while layers:
        layer = layers.pop(0)
        if isinstance(layer, nn.Conv2d) and layers and isinstance(layers[0], nn.BatchNorm2d):
            x = normalised(layer, layers.pop(0), x, _relu(layers))
        elif isinstance(layer, nn.BatchNorm2d):
            x = norm_relu(layer, x, _relu(layers))
        else:
            x = layer(x)
    return x


def _relu(layers: list[nn.Module]) -> nn.Module | None:
    """The first of the layers if it is one, which is taken."""
    return layers.pop(0) if layers and isinstance(layers[0], nn.ReLU) else None


def normalised(
    conv: nn.Conv2d, norm: nn.Module, x: Tensor, relu: nn.Module | None = None, added: Tensor | None = None
) -> Tensor:
    """relu(added + norm(conv(x))), where batch statistics are used without the bias of the convolution.

    ``relu`` and ``added`` may be None.

    The running mean is that of before, with the bias, and so are weights in a checkpoint. The gradient of the bias is
    exactly zero, not zero up to rounding.
    """
    if conv.bias is None or not _is_unfelt(conv, norm):
        return norm_relu(norm, conv(x), relu, added=added)
    weight = _Unfelt.apply(conv.weight, conv.bias)  # type: ignore[no-untyped-call]
    return norm_relu(norm, conv._conv_forward(x, weight, None), relu, conv.bias, added)


def _is_unfelt(conv: nn.Module, norm: nn.Module) -> bool:
    """Whether the norm takes the bias away, and nobody looks in between or computes the weights anew at every call."""
    return (
        type(conv) is nn.Conv2d  # not ones that do something else
        and type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.momentum not in (None, 1.0)
        and not hooked(conv)
        and not hooked(norm)
    )


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
