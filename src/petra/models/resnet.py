"""ResNets, the non-reversible twins of the PETRA paper's RevNets."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from petra.models.convolution import (
    Head,
    Stem,
    StemKind,
    basic,
    bottleneck,
    check_shape,
    initialise,
    projection,
)
from petra.models.registry import register
from petra.reversible import Network


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + f(x))."""

    def __init__(self, f: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.shortcut(x) + self.f(x))


def resnet(
    depths: tuple[int, ...],
    *,
    bottlenecks: bool = False,
    num_classes: int = 10,
    in_channels: int = 3,
    width: int = 64,
    stem: StemKind = "cifar",
) -> Network:
    """A ResNet with ``depths[i]`` blocks of ``width * 2**i`` channels in group i."""
    check_shape(depths, width, num_classes, stem)
    make, expansion = (bottleneck, 4) if bottlenecks else (basic, 1)
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=Stem(in_channels, width, stem, streams=1))
    inputs = width
    for group, depth in enumerate(depths):
        inner = width * 2**group
        for block in range(depth):
            stride = 2 if group > 0 and block == 0 else 1
            same = stride == 1 and inputs == expansion * inner
            shortcut = nn.Identity() if same else projection(inputs, expansion * inner, stride)
            f = make(inputs, inner, stride, last_relu=False)
            layers[f"group{group + 1}_block{block}"] = ResidualBlock(f, shortcut)
            inputs = expansion * inner
    layers["head"] = Head(inputs, num_classes)
    network = Network(layers)
    initialise(network)
    return network


register("resnet18", "ResNet-18, ten layers to cut", resnet, depths=(2, 2, 2, 2))
register("resnet34", "ResNet-34, eighteen layers to cut", resnet, depths=(3, 4, 6, 3))
register("resnet50", "ResNet-50, eighteen layers to cut", resnet, depths=(3, 4, 6, 3), bottlenecks=True)
