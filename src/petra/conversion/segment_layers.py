"""A segment of converted blocks as layers that can be cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from petra.conversion.converted_segment import ConvertedSegment
from petra.conversion.residual_views import ByReference
from petra.reversible import ReversibleBlock, ReversibleResidual
from petra.reversible.streams import Streams

Arguments = Callable[[Any, Tensor, Streams], Mapping[str, Any]]
"""Returns the keyword arguments of a block from the block, its input and the companions."""


def no_arguments(block: Any, x: Tensor, companions: Streams) -> Mapping[str, Any]:
    """Return no arguments, for blocks that take only their input."""
    return {}


class PlainBlock(nn.Module):
    """A block that is not reversible, with companions that pass it unchanged.

    Args:
        block: The block.
        arguments: Returns its arguments from the companions.
    """

    def __init__(self, block: nn.Module, arguments: Arguments) -> None:
        super().__init__()
        self.block = block
        self.arguments = arguments

    def forward(self, x: Tensor, *companions: Tensor) -> Streams:
        """Apply the block.

        Args:
            x: The input of the block.
            *companions: The companions.

        Returns:
            The output, followed by the companions.
        """
        y = self.block(x, **self.arguments(self.block, x, _constant(companions)))
        return (y[0] if isinstance(y, tuple) else y, *companions)


class SegmentStart(nn.Module):
    """The first layer of a segment: splits its input into the streams of the coupling."""

    def __init__(self, segment: ConvertedSegment) -> None:
        super().__init__()
        self.split = segment.split

    def forward(self, x: Tensor, *companions: Tensor) -> Streams:
        """Split the input.

        Args:
            x: The input of the segment.
            *companions: Companions, which are passed on.

        Returns:
            The streams, followed by the companions.
        """
        return (*self.split(x), *companions)


class SegmentEnd(nn.Module):
    """The last layer of a segment: joins the streams of the coupling, and applies the norm of a post-norm block."""

    def __init__(self, segment: ConvertedSegment) -> None:
        super().__init__()
        self.join = segment.join
        self.streams = segment.streams
        self.dtype = dtype_of(segment.blocks[0])
        self.norm = None if segment.final_norm is None else segment.final_norm(segment.blocks[-1])

    def forward(self, *streams: Tensor) -> Tensor | Streams:
        """Join the streams.

        Args:
            *streams: The streams, followed by companions.

        Returns:
            The output of the segment, followed by the companions.
        """
        y = self.join(*streams[: self.streams])
        if self.dtype is not None and y.dtype != self.dtype:
            y = y.to(self.dtype)
        if self.norm is not None:
            y = self.norm(y)
        companions = streams[self.streams :]
        return (y, *companions) if companions else y


class CompanionResidual(nn.Module):
    """A residual function of a block that finds its keyword arguments in the companions."""

    def __init__(self, function: nn.Module, segment: ConvertedSegment, block: nn.Module, arguments: Arguments) -> None:
        super().__init__()
        self.function = function
        self.arguments = arguments
        self.skipped = segment.streams - 2
        dtype = dtype_of(block)
        blended = segment.blend is not None and dtype != torch.float64
        self.precision = dtype if blended or dtype in (torch.float16, torch.bfloat16) else None
        self._block = (block,)  # in a tuple, because its modules are registered by the function

    def forward(self, x: Tensor, *companions: Tensor) -> Any:
        """Evaluate the function.

        Args:
            x: Its input.
            *companions: The companions; those that belong to the coupling are skipped.

        Returns:
            The result of the function.
        """
        kwargs = self.arguments(self._block[0], x, _constant(companions[self.skipped :]))
        return self.function(x, precision=self.precision, **kwargs)


def segment_layers(segment: ConvertedSegment, arguments: Arguments = no_arguments) -> list[nn.Module]:
    """Return a segment of converted blocks as layers: the start, a reversible layer for each block, and the end.

    Args:
        segment: The segment.
        arguments: Returns the arguments of a block from the companions.

    Returns:
        The layers.
    """

    def view(function: nn.Module, block: nn.Module) -> CompanionResidual:
        return CompanionResidual(function, segment, block, arguments)

    layers: list[nn.Module] = []
    for layer, block in zip(segment.layers, segment.blocks, strict=True):
        if isinstance(layer, ReversibleBlock):
            layers.append(ReversibleBlock(view(layer.f, block), view(layer.g, block), layer.coupling))
        else:
            assert isinstance(layer, ReversibleResidual)
            layers.append(type(layer)(view(layer.f, block), layer.coupling))
    return [SegmentStart(segment), *layers, SegmentEnd(segment)]


def dtype_of(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of a module's weights, None if it has none."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def _constant(companions: Streams) -> Streams:
    """Detach companions, so that no gradients are computed for masks and positions."""
    return tuple(x.detach() for x in companions)


__all__ = ["Arguments", "ByReference", "PlainBlock", "no_arguments", "segment_layers"]
