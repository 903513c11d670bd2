"""Parts that ResNets and RevNets share: residual branches, stem, head, initialisation."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import torch
from torch import Tensor, nn

from petra.kernels.conv_norm import ConvNorm, conv_norm_relu

StemKind = Literal["cifar", "imagenet"]


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    """A padded convolution; only its stride changes the resolution. With bias by default, as in the PETRA paper."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=bias)


def conv_bn_relu(
    channels: tuple[int, ...], kernels: tuple[int, ...], stride: int, last_relu: bool, bias: bool = True
) -> ConvNorm:
    """Conv-BN-ReLU for each kernel size. The first 3×3 convolution has the stride."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    strided = kernels.index(3)
    for i, kernel in enumerate(kernels):
        layers[f"conv{i + 1}"] = conv(channels[i], channels[i + 1], kernel, stride if i == strided else 1, bias)
        layers[f"bn{i + 1}"] = nn.BatchNorm2d(channels[i + 1])
        if last_relu or i < len(kernels) - 1:
            layers[f"relu{i + 1}"] = nn.ReLU(inplace=True)
    return ConvNorm(layers)


def basic_branch(inputs: int, width: int, stride: int = 1, last_relu: bool = True, bias: bool = True) -> ConvNorm:
    """The residual branch of a basic block: two 3×3 convolutions."""
    return conv_bn_relu((inputs, width, width), (3, 3), stride, last_relu, bias)


def bottleneck_branch(inputs: int, width: int, stride: int = 1, last_relu: bool = True, bias: bool = True) -> ConvNorm:
    """The residual branch of a bottleneck block: 1×1, 3×3, 1×1 convolutions; the last has 4 × `width` channels."""
    return conv_bn_relu((inputs, width, width, 4 * width), (1, 3, 1), stride, last_relu, bias)


def projection(inputs: int, outputs: int, stride: int, bias: bool = True) -> ConvNorm:
    """A shortcut to another shape: a 1×1 convolution and batch norm."""
    convolution = conv(inputs, outputs, 1, stride, bias)
    return ConvNorm(OrderedDict([("conv", convolution), ("bn", nn.BatchNorm2d(outputs))]))


class Stem(nn.Module):
    """The first layer: a 3×3 convolution for small images, a strided 7×7 convolution and pooling for large ones.

    With `streams` = 2, its channels are split into the two streams of a reversible network.
    """

    def __init__(self, inputs: int, width: int, kind: StemKind, streams: int, bias: bool = True) -> None:
        super().__init__()
        large = kind == "imagenet"
        self.streams = streams
        self.conv = conv(inputs, streams * width, 7 if large else 3, 2 if large else 1, bias)
        self.bn = nn.BatchNorm2d(streams * width)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = conv_norm_relu(self.conv, self.bn, x, self.relu)
        return self.pool(x).chunk(self.streams, dim=1)  # type: ignore[no-any-return]


class Head(nn.Module):
    """The last layer: average pooling of the concatenated streams, and a linear classifier."""

    def __init__(self, inputs: int, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, *streams: Tensor) -> Tensor:
        pooled = [x.mean(dim=(2, 3)) for x in streams]
        return self.fc(torch.cat(pooled, dim=1))  # type: ignore[no-any-return]


def initialise_convolutions(network: nn.Module) -> None:
    """Initialise convolutions as ResNets do (He et al., 2015)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def check_shape(depths: tuple[int, ...], width: int, num_classes: int, stem: str) -> None:
    """Raise `ValueError` if a size is invalid."""
    if not depths or min(depths) < 1:
        raise ValueError(f"depths is {depths}: give the number of blocks of each group, each 1 or more")
    if width < 1 or num_classes < 1:
        raise ValueError(f"width is {width} and num_classes is {num_classes}: give 1 or more for both")
    if stem not in ("cifar", "imagenet"):
        raise ValueError(f"stem is {stem!r}: choose 'cifar' (3×3) or 'imagenet' (7×7 and pooling)")
