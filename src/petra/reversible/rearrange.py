"""Reversible layers that only move values: exact bit for bit, and without parameters.

Space-to-depth as in i-RevNet (Jacobsen et al., 2018) keeps every value of an image where a stride would drop
three of four. A network that downsamples so and is made of reversible blocks otherwise inverts as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import pad, pixel_shuffle, pixel_unshuffle

from petra.reversible.coupling import Coupling
from petra.reversible.gradients import Reversal
from petra.reversible.layer import CoupledLayer
from petra.reversible.streams import Gradients, Streams


@dataclass(frozen=True)
class Rearrangement(Coupling):
    """Moves values of the first two streams and adds zeros; further streams pass unchanged."""

    layer: nn.Module
    """The layer whose step it is."""
    reads = ()

    @property
    def modules(self) -> tuple[nn.Module, ...]:  # type: ignore[override]
        return (self.layer,)

    def reverse(self, streams: Streams, gradients: Gradients) -> Reversal:
        inputs = self.inverse(tuple(x.detach() for x in streams))
        pair, passed = gradients[:2], gradients[2:]
        if all(g is None for g in pair):
            return Reversal(inputs, (*[None] * (len(inputs) - len(passed)), *passed), {})
        # Each output is one of the inputs or zero, so the transpose, which gradients take, is the inverse.
        filled = tuple(torch.zeros_like(x) if g is None else g for x, g in zip(streams, pair, strict=False))
        return Reversal(inputs, (*self.inverse(filled), *passed), {})


@dataclass(frozen=True)
class SpaceToDepth(Rearrangement):
    """Each factor × factor tile of an image becomes one pixel with factor² times the channels."""

    factor: int

    def forward(self, streams: Streams) -> Streams:
        for x in streams[:2]:
            if x.ndim < 3 or x.shape[-2] % self.factor or x.shape[-1] % self.factor:
                raise ValueError(
                    f"a stream of shape {tuple(x.shape)} cannot be cut into tiles of {self.factor}×{self.factor}: "
                    f"its last two dimensions, height and width, must be multiples of {self.factor}; pad the images"
                )
        return (*(pixel_unshuffle(x, self.factor) for x in streams[:2]), *streams[2:])

    def inverse(self, streams: Streams) -> Streams:
        return (*(pixel_shuffle(x, self.factor) for x in streams[:2]), *streams[2:])


@dataclass(frozen=True)
class PaddedSplit(Rearrangement):
    """One image of ``inputs`` channels, followed by zeros, becomes two streams of ``channels`` each."""

    inputs: int
    channels: int

    def forward(self, streams: Streams) -> Streams:
        x, *passed = streams
        if x.ndim < 3 or x.shape[-3] != self.inputs:
            raise ValueError(f"the stem takes images of {self.inputs} channels, not shape {tuple(x.shape)}")
        padded = pad(x, (0, 0, 0, 0, 0, 2 * self.channels - self.inputs))
        return (*padded.chunk(2, dim=-3), *passed)

    def inverse(self, streams: Streams) -> Streams:
        return (torch.cat(streams[:2], dim=-3).narrow(-3, 0, self.inputs), *streams[2:])


class InvertibleDownsampling(CoupledLayer):
    """Space-to-depth of both streams: height and width divided by ``factor``, channels times factor²."""

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
    """Makes two streams of ``channels`` each of an image: space-to-depth, then channels of zeros (i-RevNet).

    If the image already fills the streams, nothing is added.
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
        return (split,) if self.factor == 1 else (SpaceToDepth(self, self.factor), split)

    def extra_repr(self) -> str:
        return f"inputs={self.inputs}, channels={self.channels}, factor={self.factor}"
