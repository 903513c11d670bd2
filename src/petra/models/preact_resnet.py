"""The RevNets of the RevNet paper and the ResNets that it compares them with (Table 2), all with pre-activation.

The paper does not say how the shape changes between groups. Here the first unit of such a group is not reversible. Its
first convolution has the stride. Its shortcuts pool and pad (no parameters) if it is basic, and are 1×1 convolutions if
it is a bottleneck. The stem is conv-BN-ReLU, so the first residual branch begins with its convolution. A BN-ReLU
precedes the final pooling. With these choices, all six networks for CIFAR-10 and CIFAR-100 have the parameter counts of
the table to the last printed digit.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from petra.models.convolution import Stem, StemKind, check_shape, conv, initialise_convolutions
from petra.models.preactivation import NormalisedHead, PooledShortcut, preact_basic_branch, preact_bottleneck_branch
from petra.models.registry import register
from petra.reversible import Network, ReversibleBlock


class ResidualUnit(nn.Module):
    """x → shortcut(x) + f(x)."""

    def __init__(self, f: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.f(x)  # type: ignore[no-any-return]


class ReshapingUnit(nn.Module):
    """The unit of a RevNet that changes the shape and is not invertible: y1 = s1(x1) + f(x2), y2 = s2(x2) + g(y1)."""

    def __init__(self, f: nn.Module, g: nn.Module, shortcut1: nn.Module, shortcut2: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.g = g
        self.shortcut1 = shortcut1
        self.shortcut2 = shortcut2

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = self.shortcut1(x1) + self.f(x2)
        return y1, self.shortcut2(x2) + self.g(y1)


def preact_resnet(
    depths: tuple[int, ...],
    *,
    reversible: bool,
    channels: tuple[int, ...],
    bottlenecks: bool = False,
    num_classes: int = 10,
    in_channels: int = 3,
    width: int | None = None,
    stem: StemKind = "cifar",
) -> Network:
    """Build a pre-activation ResNet or a RevNet as in the RevNet paper.

    Args:
        depths: Number of units of each group. The resolution halves between groups.
        reversible: Build a RevNet: each of its two streams has half of the channels, and each unit has two residual
            branches.
        channels: Channels of each group. Groups beyond these double the channels of the group before.
        bottlenecks: Use branches of 1×1, 3×3 and 1×1 convolutions instead of two 3×3 convolutions. The streams then
            have four times as many channels.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        width: Channels of the first group; those of the other groups are scaled by the same factor. By default,
            `channels[0]`.
        stem: `"cifar"` for a 3×3 convolution, `"imagenet"` for a strided 7×7 convolution and pooling.

    Returns:
        The network: stem, units, head.

    Raises:
        ValueError: If a size is invalid.
    """
    streams = 2 if reversible else 1
    sizes = _channels_per_stream(channels, width, len(depths), streams)
    check_shape(depths, sizes[0], num_classes, stem)
    make, expansion = (preact_bottleneck_branch, 4) if bottlenecks else (preact_basic_branch, 1)
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=Stem(in_channels, sizes[0], stem, streams, bias=False))
    inputs = sizes[0]
    for group, depth in enumerate(depths):
        outputs = expansion * sizes[group]
        for unit in range(depth):
            stride = 2 if group > 0 and unit == 0 else 1
            f = make(inputs, outputs, stride, activate=group + unit > 0)
            shortcuts = [_shortcut(inputs, outputs, stride, bottlenecks) for _ in range(streams)]
            layer: nn.Module
            if not reversible:
                layer = ResidualUnit(f, *shortcuts)
            elif stride == 1 and inputs == outputs:
                layer = ReversibleBlock(f, make(outputs, outputs))
            else:
                layer = ReshapingUnit(f, make(outputs, outputs), *shortcuts)
            layers[f"group{group + 1}_unit{unit}"] = layer
            inputs = outputs
    layers["head"] = NormalisedHead(streams * inputs, num_classes)
    network = Network(layers)
    initialise_convolutions(network)
    return network


def _channels_per_stream(channels: tuple[int, ...], width: int | None, groups: int, streams: int) -> list[int]:
    """Channels per stream of each group, scaled so that the first group has `width` channels in all."""
    if not channels or min(channels) < streams or sorted(channels) != list(channels):
        raise ValueError(f"channels is {channels}: give the channels of each group, in ascending order")
    if width is None:
        width = channels[0]
    if width < 1 or width % streams:
        raise ValueError(
            f"width is {width}, but it is divided among {streams} streams: give a positive multiple of {streams}"
        )
    known = [round(c * width / channels[0] / streams) for c in channels[:groups]]
    return known + [known[-1] * 2**i for i in range(1, groups - len(known) + 1)]


def _shortcut(inputs: int, outputs: int, stride: int, projected: bool) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    if projected:
        return conv(inputs, outputs, 1, stride, bias=False)
    return PooledShortcut(inputs, outputs, stride)


def _register_pair(
    revnet: tuple[int, tuple[int, ...], tuple[int, ...]],
    resnet: tuple[int, tuple[int, ...], tuple[int, ...]],
    *,
    bottlenecks: bool,
    stem: StemKind = "cifar",
) -> None:
    """Register a RevNet and a ResNet of Table 2, each given by its number of layers, its depths and its channels."""
    for kind, (number, depths, channels) in (("RevNet", revnet), ("ResNet", resnet)):
        data, classes = ("CIFAR", 10) if stem == "cifar" else ("ImageNet", 1000)
        register(
            f"{kind.lower()}{number}",
            f"{kind}-{number} of the RevNet paper for {data}, up to {sum(depths) + 2} stages",
            preact_resnet,
            depths=depths,
            channels=channels,
            reversible=kind == "RevNet",
            bottlenecks=bottlenecks,
            stem=stem,
            num_classes=classes,
        )


_register_pair((38, (3, 3, 3), (32, 64, 112)), (32, (5, 5, 5), (16, 32, 64)), bottlenecks=False)
_register_pair((110, (9, 9, 9), (32, 64, 128)), (110, (18, 18, 18), (16, 32, 64)), bottlenecks=False)
_register_pair((164, (9, 9, 9), (32, 64, 128)), (164, (18, 18, 18), (16, 32, 64)), bottlenecks=True)
_register_pair(
    (104, (2, 2, 11, 2), (128, 256, 512, 832)),
    (101, (3, 4, 23, 3), (64, 128, 256, 512)),
    bottlenecks=True,
    stem="imagenet",
)
