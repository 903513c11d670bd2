"""RevNets in which every layer before the classifier is invertible.

The layers between groups rearrange pixels to channels and the stem pads with zeros, as in i-RevNet (Jacobsen et al.,
2018). Only the head is not reversible, and no stage before it stores an activation. The streams have four times as many
channels after each change of resolution; inside, the residual branches have the channels of a RevNet with the same
depths.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from petra.models.convolution import StemKind, check_shape, initialise_convolutions
from petra.models.preactivation import NormalisedHead, bn_relu_conv
from petra.models.registry import register
from petra.reversible import InjectiveStem, InvertibleDownsampling, Network, ReversibleResidual


def irevnet(
    depths: tuple[int, ...],
    *,
    bottlenecks: bool = False,
    num_classes: int = 10,
    in_channels: int = 3,
    width: int = 64,
    stem: StemKind = "cifar",
) -> Network:
    """Build a RevNet in which every layer but the head is reversible.

    Height and width of the images must be multiples of `2**(len(depths) - 1)`, or four times as much with the stem
    `"imagenet"`.

    Args:
        depths: Number of blocks of each group. The resolution halves between groups.
        bottlenecks: Use branches of 1×1, 3×3 and 1×1 convolutions instead of two 3×3 convolutions.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        width: Channels inside the residual branches of the first group; they double in each further group. The streams
            of the first group have `width // 4` channels, but at least as many as the image needs, and four times as
            many in each further group.
        stem: `"cifar"` keeps the resolution, `"imagenet"` turns 4×4 pixels into one.

    Returns:
        The network: stem, blocks, head.

    Raises:
        ValueError: If a size is invalid.
    """
    check_shape(depths, width, num_classes, stem)
    factor = 4 if stem == "imagenet" else 1
    channels = max(width // 4, -(-in_channels * factor**2 // 2))
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=InjectiveStem(in_channels, channels, factor))
    for group, depth in enumerate(depths):
        if group > 0:
            layers[f"group{group + 1}_downsampling"] = InvertibleDownsampling()
            channels *= 4
        inner = [width * 2**group] * (2 if bottlenecks else 1)
        kernels = (1, 3, 1) if bottlenecks else (3, 3)
        for block in range(depth):
            # The input of the first branch is the image: no BN-ReLU before its first convolution.
            f = bn_relu_conv((channels, *inner, channels), kernels, activate=group + block > 0)
            layers[f"group{group + 1}_block{block}"] = ReversibleResidual(f)
    layers["head"] = NormalisedHead(2 * channels, num_classes)
    network = Network(layers)
    initialise_convolutions(network)
    return network


register(
    "irevnet18",
    "RevNet-18 with invertible downsampling, reversible except for its head, up to 13 stages",
    irevnet,
    depths=(2, 2, 2, 2),
)
register(
    "irevnet50",
    "RevNet-50 with invertible downsampling, reversible except for its head, up to 21 stages",
    irevnet,
    depths=(3, 4, 6, 3),
    bottlenecks=True,
)
