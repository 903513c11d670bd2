"""Parts of pre-activation networks: BN-ReLU-convolution without bias (RevNet, Equation 3)."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad

from petra.kernels.conv_norm import ConvNorm
from petra.kernels.fused_norm import norm_relu
from petra.models.convolution import conv


def bn_relu_conv(
    channels: tuple[int, ...], kernels: tuple[int, ...], stride: int = 1, activate: bool = True
) -> nn.Sequential:
    """BN-ReLU-convolution for each kernel size. The first convolution has the stride.

    Without `activate`, the first BN-ReLU is omitted: the input is already activated, or is the image.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, kernel in enumerate(kernels):
        if activate or i > 0:
            layers[f"bn{i + 1}"] = nn.BatchNorm2d(channels[i])
            layers[f"relu{i + 1}"] = nn.ReLU(inplace=True)
        layers[f"conv{i + 1}"] = conv(channels[i], channels[i + 1], kernel, stride if i == 0 else 1, bias=False)
    return ConvNorm(layers)


def preact_basic_branch(inputs: int, outputs: int, stride: int = 1, activate: bool = True) -> nn.Sequential:
    """The residual branch of a pre-activation basic block: two 3×3 convolutions."""
    return bn_relu_conv((inputs, outputs, outputs), (3, 3), stride, activate)


def preact_bottleneck_branch(inputs: int, outputs: int, stride: int = 1, activate: bool = True) -> nn.Sequential:
    """The residual branch of a pre-activation bottleneck: 1×1, 3×3, 1×1 convolutions, with a quarter of the width."""
    inner = outputs // 4
    return bn_relu_conv((inputs, inner, inner, outputs), (1, 3, 1), stride, activate)


class PooledShortcut(nn.Module):
    """A shortcut to another shape without parameters: average pooling, and channels of zeros on both sides."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (outputs - inputs) // 2
        self.after = outputs - inputs - self.before

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            # Rounds an odd size up, as a convolution with this stride does.
            x = avg_pool2d(x, self.stride, ceil_mode=True)
        return pad(x, (0, 0, 0, 0, self.before, self.after))

    def extra_repr(self) -> str:
        return f"stride={self.stride}, before={self.before}, after={self.after}"


class NormalisedHead(nn.Module):
    """The last layer: BN-ReLU of the concatenated streams, average pooling and a linear classifier."""

    def __init__(self, inputs: int, num_classes: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, *streams: Tensor) -> Tensor:
        pooled = norm_relu(self.bn, torch.cat(streams, dim=1), self.relu).mean(dim=(2, 3))
        return self.fc(pooled)  # type: ignore[no-any-return]
