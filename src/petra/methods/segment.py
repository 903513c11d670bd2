"""Segments: consecutive layers of a stage, and the parts of them that are evaluated with one random seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petra.formatting import first_line
from petra.reversible.coupling import Coupling
from petra.reversible.layer import ReversibleLayer
from petra.reversible.network import widens
from petra.reversible.storage import evaluate
from petra.reversible.streams import Streams, widened


class LayerError(ValueError):
    """A layer that fails on its inputs, or that cannot be trained with the chosen method."""


@dataclass(frozen=True)
class Part:
    """A function that is evaluated with one random seed: a coupling of a reversible layer, or any other layer."""

    key: tuple[int, int]
    """The index of the layer, and of the coupling in it.

    Layers are counted in the network, not in the stage, so that dropout masks do not depend on the partition.
    """
    function: Coupling | nn.Module
    """The coupling or layer."""
    widens: bool
    """True if outputs of lower precision are converted to float32."""
    storage: str | None = None
    """The storage under autograd, a name in `petra.reversible.storage.STORAGES`; None stores everything."""
    layer: nn.Module | None = None
    """The reversible layer of a coupling, for error messages."""

    @property
    def name(self) -> str:
        """The layer's name for error messages."""
        module = self.function.modules[0] if isinstance(self.function, Coupling) else self.function
        within = "" if self.layer in (None, module) else f" in {type(self.layer).__name__}"
        return f"layer {self.key[0]} ({type(module).__name__}{within})"

    def __call__(self, streams: Streams) -> Streams:
        versions = [version_of(x) for x in streams]
        in_place = (
            f"{self.name} changes its input in place, but that input is needed again: begin it with an out-of-place "
            "operation (inplace=False), or make it one layer with the layer before it"
        )
        try:
            outputs = evaluate((self.function,), streams, self.storage)
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError | LayerError):
                raise
            if "in-place operation" in str(error):
                raise LayerError(in_place) from error
            why = first_line(error)
            if why.startswith("Expected more than 1 value per channel"):
                why += "; batch norm cannot train on a batch of one: leave out a last batch of one (drop_last)"
            if isinstance(error, TypeError) and "positional argument" in why and len(streams) > 1:
                why += f"; it gets {len(streams)} streams: let its forward take them, or join them in a layer before it"
            shapes = ", ".join(str(tuple(x.shape)) + _unusual(x.dtype) for x in streams)
            raise LayerError(f"{self.name} cannot take inputs of shape {shapes}: {why}") from error
        if versions != [version_of(x) for x in streams]:
            raise LayerError(in_place)
        return widened(outputs) if self.widens else outputs


@dataclass(frozen=True)
class Segment:
    """Consecutive layers that a method treats alike: reversed from their outputs, or recorded from their inputs."""

    reversible: bool
    """True if inputs are reconstructed from outputs."""
    layers: tuple[nn.Module, ...]
    """The layers."""
    first: int
    """The index of the first layer in the network."""
    storage: str | None = None
    """The storage of all its layers; None if the method decides."""

    @property
    def stored(self) -> bool:
        """True if the graph of the forward is kept for the backward."""
        return self.storage is not None and not self.reversible

    def parts(self) -> list[Part]:
        """Split the segment into parts that are evaluated with one random seed each.

        Returns:
            The parts, in the order in which they are evaluated.
        """
        found: list[Part] = []
        for index, (layer, above) in enumerate(zip(self.layers, [*self.layers[1:], None], strict=True), self.first):
            if isinstance(layer, ReversibleLayer):
                found += [
                    Part((index, i), coupling, False, self.storage, layer)
                    for i, coupling in enumerate(layer.couplings())
                ]
            else:
                found.append(Part((index, 0), layer, widens(layer, above), self.storage))
        return found


def version_of(x: Tensor) -> int:
    """Return the counter of in-place changes of a tensor; 0 for inference tensors, which have none."""
    return 0 if x.is_inference() else x._version


def _unusual(dtype: torch.dtype) -> str:
    return "" if dtype is torch.float32 else f" in {str(dtype).removeprefix('torch.')}"
