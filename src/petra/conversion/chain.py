"""Layers of a chain: blocks of a container, and layers that belong together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from petra.conversion.converted_segment import ConvertedSegment
from petra.conversion.segment_layers import (
    Arguments,
    PlainBlock,
    SegmentEnd,
    SegmentStart,
    no_arguments,
    segment_layers,
)
from petra.reversible import ReversibleLayer
from petra.reversible.streams import Streams, as_streams, single


class Steps(nn.Module):
    """Several modules as one layer, with streams flowing between them.

    Args:
        modules: The modules, in the order in which they are called.
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.steps = nn.ModuleList(modules)

    def forward(self, *streams: Tensor) -> Tensor | Streams:
        """Call the modules in sequence.

        Args:
            *streams: The inputs of the first one.

        Returns:
            The outputs of the last one.
        """
        for step in self.steps:
            streams = as_streams(step(*streams))
        return single(streams)


def block_layers(
    blocks: Iterable[nn.Module | ConvertedSegment], arguments: Arguments = no_arguments
) -> list[nn.Module]:
    """Return blocks as layers, those of converted segments as reversible ones.

    Args:
        blocks: The container of the blocks.
        arguments: Returns the arguments of a block from the companions.

    Returns:
        The layers.
    """
    layers: list[nn.Module] = []
    for member in blocks:
        if isinstance(member, ConvertedSegment):
            layers += segment_layers(member, arguments)
        else:
            layers.append(PlainBlock(member, arguments))
    return layers


def join_boundaries(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Make the start of a segment one layer with the layer before it, and its end with the layer after it.

    A cut next to them would only send more streams. Other layers without parameters become one layer with the layer
    before them, because stages are cut by the number of layers.
    """
    joined: list[nn.Module] = []
    for layer in layers:
        below = joined[-1] if joined else None
        if below is None or isinstance(below, ReversibleLayer) or isinstance(layer, ReversibleLayer):
            joined.append(layer)
            continue
        steps = tuple(below.steps) if isinstance(below, Steps) else (below,)
        ends = isinstance(steps[-1], SegmentEnd) and not isinstance(layer, PlainBlock)
        if ends or isinstance(layer, SegmentStart) or not _has_parameters(layer) or not _has_parameters(below):
            joined[-1] = Steps(*steps, layer)
        else:
            joined.append(layer)
    return joined


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
