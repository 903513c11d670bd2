"""Reversible layers that only move values: exact to the bit, and without parameters.

Space-to-depth as in i-RevNet (Jacobsen et al., 2018) keeps every value of an image, where a stride of 2 would drop
three of four. A network that downsamples this way and otherwise consists of reversible blocks is invertible as a whole.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, pixel_shuffle, pixel_unshuffle

from petra.reversible.coupling import Coupling, Reconstructed
from petra.reversible.gradients import ParameterGradients
from petra.reversible.layer import CoupledLayer
from petra.reversible.streams import Gradients, Streams


@dataclass(frozen=True)
class Rearrangement(Coupling):
    """A coupling that moves the values of its streams and may add zeros; companions pass unchanged.

    Each output value is an input value or zero. So the inverse is also the transposed map, which gradients need.
    """

    layer: nn.Module
    """The layer that the coupling belongs to."""

    @property
    @abstractmethod
    def before(self) -> int:
        """The number of input streams, without companions."""

    @property
    @abstractmethod
    def after(self) -> int:
        """The number of output streams, without companions."""

    @abstractmethod
    def move(self, streams: Streams) -> Streams:
        """Move values to their new places.

        Args:
            streams: The inputs, without companions.

        Returns:
            The outputs.
        """

    @abstractmethod
    def move_back(self, moved: Gradients) -> Gradients:
        """Move values to their old places.

        Args:
            moved: The outputs, or their gradients; None stands for zero.

        Returns:
            The inputs, or their gradients.
        """

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.layer,)

    @property
    def unread(self) -> tuple[int, ...]:
        return tuple(range(self.before))

    def forward(self, streams: Streams) -> Streams:
        return (*self.move(streams[: self.before]), *streams[self.before :])

    def inverse(self, streams: Streams) -> Streams:
        return (*cast(Streams, self.move_back(streams[: self.after])), *streams[self.after :])

    def reconstruct(self, streams: Streams) -> Reconstructed:
        def backward(gradients: Gradients) -> tuple[Gradients, ParameterGradients]:
            return (*self.move_back(gradients[: self.after]), *gradients[self.after :]), {}

        with torch.no_grad():
            return Reconstructed(self.inverse(streams), backward)


@dataclass(frozen=True)
class SpaceToDepth(Rearrangement):
    """Turns each factor × factor tile of an image into one pixel with factor² times the channels."""

    factor: int
    """The height and width of a tile."""
    streams: int = 2
    """The number of streams."""

    @property
    def before(self) -> int:
        return self.streams

    @property
    def after(self) -> int:
        return self.streams

    def move(self, streams: Streams) -> Streams:
        for x in streams:
            if x.ndim < 3 or x.shape[-2] % self.factor or x.shape[-1] % self.factor:
                raise ValueError(
                    f"a stream of shape {tuple(x.shape)} cannot be cut into tiles of {self.factor}×{self.factor}: "
                    f"its last two dimensions, height and width, must be multiples of {self.factor}; pad the images"
                )
        return tuple(pixel_unshuffle(x, self.factor) for x in streams)

    def move_back(self, moved: Gradients) -> Gradients:
        return tuple(None if x is None else pixel_shuffle(x, self.factor) for x in moved)


@dataclass(frozen=True)
class PaddedSplit(Rearrangement):
    """Turns one image, padded with channels of zeros, into two streams."""

    inputs: int
    """The channels of the image."""
    channels: int
    """The channels of each stream."""

    @property
    def before(self) -> int:
        return 1

    @property
    def after(self) -> int:
        return 2

    def move(self, streams: Streams) -> Streams:
        (x,) = streams
        if x.ndim < 3 or x.shape[-3] != self.inputs:
            raise ValueError(f"the stem takes images of {self.inputs} channels, not shape {tuple(x.shape)}")
        padded = pad(x, (0, 0, 0, 0, 0, 2 * self.channels - self.inputs))
        return tuple(padded.chunk(2, dim=-3))

    def move_back(self, moved: Gradients) -> Gradients:
        known = [x for x in moved if x is not None]
        if not known:
            return (None,)
        halves: list[Tensor] = [torch.zeros_like(known[0]) if x is None else x for x in moved]
        return (torch.cat(halves, dim=-3).narrow(-3, 0, self.inputs),)


class InvertibleDownsampling(CoupledLayer):
    """Space-to-depth of both streams: divides height and width by `factor`, and multiplies channels by factor².

    Args:
        factor: The height and width of the tiles that become pixels.

    Raises:
        ValueError: If `factor` is less than 1.
    """

    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        if factor < 1:
            raise ValueError(f"factor is {factor}: give the size of the tiles that become pixels, 1 or more")
        self.factor = factor

    def couplings(self) -> tuple[Coupling, ...]:
        return (SpaceToDepth(self, self.factor),)

    def extra_repr(self) -> str:
        return f"factor={self.factor}"


class InjectiveStem(CoupledLayer):
    """Makes two streams from an image, by space-to-depth and padding with channels of zeros (i-RevNet).

    Args:
        inputs: The channels of the image.
        channels: The channels of each stream.
        factor: The height and width of the tiles that become pixels first; 1 leaves the image as it is.

    Raises:
        ValueError: If the image does not fit into the two streams.
    """

    def __init__(self, inputs: int, channels: int, factor: int = 1) -> None:
        super().__init__()
        if inputs < 1 or factor < 1 or inputs * factor**2 > 2 * channels:
            raise ValueError(
                f"{inputs} channels × {factor}×{factor} values do not fit into two streams of {channels} channels: "
                f"give {-(-inputs * factor**2 // 2)} channels or more, and inputs and factor of 1 or more"
            )
        self.inputs = inputs
        self.channels = channels
        self.factor = factor

    def couplings(self) -> tuple[Coupling, ...]:
        split = PaddedSplit(self, self.inputs * self.factor**2, self.channels)
        return (split,) if self.factor == 1 else (SpaceToDepth(self, self.factor, streams=1), split)

    def extra_repr(self) -> str:
        return f"inputs={self.inputs}, channels={self.channels}, factor={self.factor}"
