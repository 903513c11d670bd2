"""The reversible ResNets of the PETRA paper.

Each of the two streams has as many channels as the ResNet has. A block maps (x, x̃) to (x̃ + f(x), x). Blocks that change
the shape are not reversible.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from petra.models.convolution import (
    Head,
    Stem,
    StemKind,
    basic_branch,
    bottleneck_branch,
    check_shape,
    initialise_convolutions,
    projection,
)
from petra.models.registry import register
from petra.reversible import Network, ReversibleResidual


class BasicDownsampling(nn.Module):
    """(x, x̃) → (f(x) + shortcut(x̃), bn1(conv1(x))): the second stream reuses the first convolution of f."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.f = basic_branch(inputs, width, stride)
        self.f.relu1 = nn.ReLU()  # not in place, because its input is the second stream
        self.shortcut = projection(inputs, width, stride)

    def forward(self, x: Tensor, x_tilde: Tensor) -> tuple[Tensor, Tensor]:
        y_tilde = self.f[:2](x)
        return self.f[2:](y_tilde) + self.shortcut(x_tilde), y_tilde


class BottleneckDownsampling(nn.Module):
    """(x, x̃) → (f(x) + shortcut(x̃), projection(x))."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.f = bottleneck_branch(inputs, width, stride)
        self.shortcut = projection(inputs, 4 * width, stride)
        self.projection = projection(inputs, 4 * width, stride)

    def forward(self, x: Tensor, x_tilde: Tensor) -> tuple[Tensor, Tensor]:
        return self.f(x) + self.shortcut(x_tilde), self.projection(x)


def revnet(
    depths: tuple[int, ...],
    *,
    bottlenecks: bool = False,
    num_classes: int = 10,
    in_channels: int = 3,
    width: int = 64,
    stem: StemKind = "cifar",
) -> Network:
    """Build a RevNet as in the PETRA paper.

    Args:
        depths: Number of blocks of each group. The resolution halves between groups.
        bottlenecks: Use branches of 1×1, 3×3 and 1×1 convolutions instead of two 3×3 convolutions. Blocks then have
            four times as many output channels.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        width: Channels per stream of the first group; they double in each further group.
        stem: `"cifar"` for a 3×3 convolution, `"imagenet"` for a strided 7×7 convolution and pooling.

    Returns:
        The network: stem, blocks, head.

    Raises:
        ValueError: If a size is invalid.
    """
    check_shape(depths, width, num_classes, stem)
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=Stem(in_channels, width, stem, streams=2))
    inputs = width
    for group, depth in enumerate(depths):
        inner = width * 2**group
        outputs = 4 * inner if bottlenecks else inner
        for block in range(depth):
            stride = 2 if group > 0 and block == 0 else 1
            layer: nn.Module
            if stride == 1 and inputs == outputs:
                layer = ReversibleResidual(
                    bottleneck_branch(inputs, inner) if bottlenecks else basic_branch(inputs, inner)
                )
            elif bottlenecks:
                layer = BottleneckDownsampling(inputs, inner, stride)
            else:
                layer = BasicDownsampling(inputs, inner, stride)
            layers[f"group{group + 1}_block{block}"] = layer
            inputs = outputs
    layers["head"] = Head(2 * inputs, num_classes)
    network = Network(layers)
    initialise_convolutions(network)
    return network


register("revnet18", "RevNet-18 of the PETRA paper, up to 10 stages", revnet, depths=(2, 2, 2, 2))
register("revnet34", "RevNet-34 of the PETRA paper, up to 18 stages", revnet, depths=(3, 4, 6, 3))
register(
    "revnet50",
    "RevNet-50 of the PETRA paper, up to 18 stages",
    revnet,
    depths=(3, 4, 6, 3),
    bottlenecks=True,
)
