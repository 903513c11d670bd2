"""ResNets: the non-reversible counterparts of the PETRA paper's RevNets, and those of the Features Replay paper.

The Features Replay paper trains "ResNet164 with the basic building block, ResNet101 and ResNet152 with the bottleneck
building block", and a network of 512 layers, on CIFAR. 164 and 512 are of the form 6n + 2, the depth of the CIFAR
networks in Section 4.2 of He et al. (2016): three groups of n basic blocks with 16, 32 and 64 channels, and shortcuts
without parameters. 152 is not of the form 9n + 2, so 101 and 152 are built from the four groups of their Table 1, with
64 to 512 channels inside, a 3×3 stem and projected shortcuts. Convolutions have no bias. With 10 classes:

    resnet164-basic   n = 27              2,602,906 parameters
    resnet512-basic   n = 85              8,241,434
    resnet101-cifar   blocks 3, 4, 23, 3  42,512,970
    resnet152-cifar   blocks 3, 8, 36, 3  58,156,618
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn.functional import pad

from petra.kernels.conv_norm import ConvNorm
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
from petra.reversible import Network
from petra.reversible.streams import narrowed


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + f(x))."""

    narrows = True

    def __init__(self, f: ConvNorm, shortcut: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.shortcut = shortcut
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = narrowed(x)
        return self.f.add_relu(self.shortcut(x), x, self.relu)


class PaddedShortcut(nn.Module):
    """A shortcut to another shape without parameters: option A of He et al. (2016).

    It takes every `stride`-th pixel in both directions and appends channels of zeros.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.padding = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        return pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.padding))

    def extra_repr(self) -> str:
        return f"stride={self.stride}, padding={self.padding}"


def resnet(
    depths: tuple[int, ...],
    *,
    bottlenecks: bool = False,
    bias: bool = True,
    padded: bool = False,
    num_classes: int = 10,
    in_channels: int = 3,
    width: int = 64,
    stem: StemKind = "cifar",
) -> Network:
    """Build a ResNet.

    Args:
        depths: Number of blocks of each group. The resolution halves between groups.
        bottlenecks: Use branches of 1×1, 3×3 and 1×1 convolutions instead of two 3×3 convolutions. Blocks then have
            four times as many output channels.
        bias: Use convolutions with bias.
        padded: Where the shape changes, use shortcuts without parameters, padded with zeros, instead of 1×1
            convolutions.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        width: Channels of the first group; they double in each further group.
        stem: `"cifar"` for a 3×3 convolution, `"imagenet"` for a strided 7×7 convolution and pooling.

    Returns:
        The network: stem, blocks, head.

    Raises:
        ValueError: If a size is invalid.
    """
    check_shape(depths, width, num_classes, stem)
    make, expansion = (bottleneck_branch, 4) if bottlenecks else (basic_branch, 1)
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=Stem(in_channels, width, stem, 1, bias))
    inputs = width
    for group, depth in enumerate(depths):
        inner = width * 2**group
        for block in range(depth):
            stride = 2 if group > 0 and block == 0 else 1
            same = stride == 1 and inputs == expansion * inner
            shortcut: nn.Module = nn.Identity()
            if not same:
                shape = inputs, expansion * inner, stride
                shortcut = PaddedShortcut(*shape) if padded else projection(*shape, bias)
            f = make(inputs, inner, stride, last_relu=False, bias=bias)
            layers[f"group{group + 1}_block{block}"] = ResidualBlock(f, shortcut)
            inputs = expansion * inner
    layers["head"] = Head(inputs, num_classes)
    network = Network(layers)
    initialise_convolutions(network)
    return network


register("resnet18", "ResNet-18, up to 10 stages", resnet, depths=(2, 2, 2, 2))
register("resnet34", "ResNet-34, up to 18 stages", resnet, depths=(3, 4, 6, 3))
register("resnet50", "ResNet-50, up to 18 stages", resnet, depths=(3, 4, 6, 3), bottlenecks=True)

_CIFAR = {"stem": "cifar", "num_classes": 10}
for number, blocks in ((164, 27), (512, 85)):
    register(
        f"resnet{number}-basic",
        f"ResNet-{number} with basic blocks of the Features Replay paper for CIFAR, up to {3 * blocks + 2} stages",
        resnet,
        depths=(blocks, blocks, blocks),
        width=16,
        bias=False,
        padded=True,
        **_CIFAR,
    )
for number, depths in ((101, (3, 4, 23, 3)), (152, (3, 8, 36, 3))):
    register(
        f"resnet{number}-cifar",
        f"ResNet-{number} with bottlenecks of the Features Replay paper for CIFAR, up to {sum(depths) + 2} stages",
        resnet,
        depths=depths,
        bottlenecks=True,
        bias=False,
        **_CIFAR,
    )
