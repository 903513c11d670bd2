"""RevNets that are reversible from the data to the classifier: nothing is thrown away on the way.

Groups are joined by space-to-depth and the stem pads with zeros, as in i-RevNet (Jacobsen et al., 2018), so only
the head is an ordinary layer and no stage below it keeps an activation. Streams then grow four times at each
change of resolution; the residual functions do not: inside they have the channels of the RevNet of the same depths.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from petra.models.convolution import StemKind, check_shape, initialise
from petra.models.preactivation import NormalisedHead, preactivated
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
    """A RevNet with ``depths[i]`` reversible blocks of ``width * 2**i`` channels inside in group i.

    The streams of group i have ``width // 4 * 4**i`` channels, or more where an image needs more: with the stem
    "imagenet", 4×4 pixels become one. Height and width of images must be multiples of what is divided in all.
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
            # The first reads the data themselves.
            f = preactivated((channels, *inner, channels), kernels, activate=group + block > 0)
            layers[f"group{group + 1}_block{block}"] = ReversibleResidual(f)
    layers["head"] = NormalisedHead(2 * channels, num_classes)
    network = Network(layers)
    initialise(network)
    return network


register(
    "irevnet18",
    "RevNet-18 with invertible downsampling, reversible up to the head, thirteen layers to cut",
    irevnet,
    depths=(2, 2, 2, 2),
)
register(
    "irevnet50",
    "RevNet-50 with invertible downsampling, reversible up to the head, twenty-one layers to cut",
    irevnet,
    depths=(3, 4, 6, 3),
    bottlenecks=True,
)
