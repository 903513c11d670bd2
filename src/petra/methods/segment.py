"""Consecutive layers of a stage, and the parts of them that are evaluated in one go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petra.errors import first_line
from petra.reversible.coupling import Coupling
from petra.reversible.layer import ReversibleLayer
from petra.reversible.streams import Streams, as_streams, widened


class LayerError(ValueError):
    """A layer that failed on what it was given."""


@dataclass(frozen=True)
class Part:
    """What is evaluated in one go and with one seed: a coupling of a reversible layer, or another layer as a whole."""

    key: tuple[int, int]
    """Its layer, and which coupling of it.

    The layer is counted in the network, not in the stage: masks do not depend on where stages are cut.
    """
    what: Coupling | nn.Module
    wide: bool
    """Whether what it gives is to be widened."""

    @property
    def name(self) -> str:
        module = self.what.modules[0] if isinstance(self.what, Coupling) else self.what
        return f"layer {self.key[0]} ({type(module).__name__})"

    def __call__(self, streams: Streams) -> Streams:
        versions = [version_of(x) for x in streams]
        in_place = (
            f"{self.name} changes its input in place, but that input is needed again: begin it with an out-of-place "
            "operation (inplace=False), or make it one layer with the layer before it"
        )
        try:
            what = self.what
            outputs = what.forward(streams) if isinstance(what, Coupling) else as_streams(what(*streams))
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError | LayerError):
                raise
            if "in-place operation" in str(error):
                raise LayerError(in_place) from error
            why = first_line(error)
            if why.startswith("Expected more than 1 value per channel"):
                why += "; batch norm cannot train on a batch of one: leave such a last one out (drop_last)"
            shapes = ", ".join(str(tuple(x.shape)) + _unusual(x.dtype) for x in streams)
            raise LayerError(f"{self.name} cannot take inputs of shape {shapes}: {why}") from error
        if versions != [version_of(x) for x in streams]:
            raise LayerError(in_place)
        return widened(outputs) if self.wide else outputs


@dataclass(frozen=True)
class Segment:
    """Consecutive layers that a method treats alike: reversed from output, or recorded from input."""

    reversible: bool
    layers: tuple[nn.Module, ...]
    first: int
    """The index of the first layer in the whole network."""

    def parts(self) -> list[Part]:
        """In the order in which they are evaluated."""
        found: list[Part] = []
        for index, (layer, above) in enumerate(zip(self.layers, [*self.layers[1:], None], strict=True), self.first):
            if isinstance(layer, ReversibleLayer):
                found += [Part((index, i), coupling, False) for i, coupling in enumerate(layer.couplings())]
            else:
                found.append(Part((index, 0), layer, not getattr(above, "narrows", False)))
        return found


def version_of(x: Tensor) -> int:
    """Counts changes in place, where they are counted."""
    return 0 if x.is_inference() else x._version


def _unusual(dtype: torch.dtype) -> str:
    return "" if dtype is torch.float32 else f" in {str(dtype).removeprefix('torch.')}"
