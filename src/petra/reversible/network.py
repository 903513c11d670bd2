"""A network as a sequence of layers: the form that every training method of Petra can partition and train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from petra.reversible.backprop import reversible_segment
from petra.reversible.coupling import TwoStreamCoupling
from petra.reversible.keyword_arguments import Keywords
from petra.reversible.layer import ReversibleBlock, ReversibleLayer, ReversibleResidual
from petra.reversible.segment_graph import SegmentGraphs
from petra.reversible.storage import evaluate, set_storage, storage_of
from petra.reversible.streams import Streams, as_streams, single, widened


class Network(nn.Sequential):
    """Layers in sequence, with streams flowing between them.

    An `nn.Sequential` whose layers may take and return several tensors. For the backward pass, each segment of
    consecutive reversible layers stores nothing but its outputs. So `loss.backward()` gives exact gradients with memory
    that does not grow with the number of reversible layers. Keyword arguments reach the residual functions of all
    reversible layers, including those of networks that are layers of this one.
    """

    segment_graphs: SegmentGraphs | None = None

    def use_cuda_graphs(self, on: bool = True) -> Self:
        """Capture each reversible segment as CUDA graphs, and launch these instead of single kernels.

        A segment is captured when it first receives inputs of given shapes, dtypes and layouts. This speeds up networks
        of many small kernels on a GPU; on a CPU it has no effect. A captured segment keeps its memory. Residual
        functions must not draw random numbers, and parameters must stay the same tensors.

        Args:
            on: False returns to ordinary kernel launches.

        Returns:
            The network itself.
        """
        self.segment_graphs = SegmentGraphs() if on else None
        return self

    def use_coupling(self, coupling: type[TwoStreamCoupling]) -> Self:
        """Set the coupling of all reversible blocks.

        Args:
            coupling: The class of the coupling, for example `petra.FixedPointCoupling` for an exact inverse.

        Returns:
            The network itself.

        Raises:
            ValueError: If `coupling` is not a class.
        """
        if not callable(coupling):
            raise ValueError(
                f"coupling is {coupling!r}: give a class like petra.FixedPointCoupling or petra.AdditiveCoupling"
            )
        for layer in self.modules():
            if isinstance(layer, ReversibleBlock | ReversibleResidual):
                layer.coupling = coupling
        return self

    def compile_functions(self, **options: Any) -> Self:
        """Apply `torch.compile` in place to the residual functions of reversible layers and to all other layers.

        Args:
            **options: Options of `torch.compile`. Shapes are static unless `dynamic` is given, because layers of one
                class differ in their shapes.

        Returns:
            The network itself.
        """
        # Functions of one class share their compiled code, with one version for each shape, mode and type of submodule.
        config = torch._dynamo.config
        limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # PyTorch 2.6
        setattr(config, limit, max(getattr(config, limit), 256))
        options = {"dynamic": False, **options}
        for layer in self:
            if isinstance(layer, ReversibleLayer):
                for coupling in layer.couplings():
                    for module in coupling.modules:
                        module.compile(**options)
            else:
                layer.compile(**options)
        return self

    def use_storage(self, *storages: str) -> Self:
        """Set what each layer keeps for its backward pass.

        Reversible layers reconstruct their inputs by default, and other layers store what autograd needs. The gradients
        are the same with every storage. `petra.fit_memory` chooses the fastest for a given amount of memory.

        - `"reconstruct"`: nothing; only for reversible layers
        - `"store"`: all that autograd needs
        - `"store:B"`: compiled as a whole; about a share B, between 0 and 1, of what that would save
        - `"selective"`: results of matrix products, convolutions and attention
        - `"recompute"`: the inputs, from which the layer is computed again
        - `"offload"`: all that autograd needs, in host memory

        Args:
            *storages: One for each layer, or a single one for all reversible layers.

        Returns:
            The network itself.

        Raises:
            ValueError: If a name is unknown, a layer is not reversible, or the number is wrong.
        """
        set_storage(list(self), storages)
        return self

    def forward(self, *inputs: Tensor, **kwargs: Any) -> Tensor | Streams:
        """Apply the layers in sequence.

        Args:
            *inputs: The streams for the first layer.
            **kwargs: Keyword arguments for the residual functions of all reversible layers.

        Returns:
            The output of the last layer: a tensor, or a tuple if it returns several.

        Raises:
            ValueError: If keyword arguments are given and there are no reversible layers.
        """
        streams = widened(as_streams(inputs))
        if kwargs and not self._takes_keywords():
            raise ValueError(
                f"{', '.join(kwargs)} given by name, but only functions of reversible layers take keyword arguments, "
                "and this network has none: pass them as streams from layer to layer"
            )
        for storage, layers in segments(self):
            if storage == "reconstruct":
                streams = reversible_segment(
                    cast(list[ReversibleLayer], layers), streams, self.segment_graphs, **kwargs
                )
            else:
                for layer, above in zip(layers, [*layers[1:], None], strict=True):
                    if isinstance(layer, ReversibleLayer):
                        streams = _stored(layer, streams, storage, **kwargs)
                        continue
                    inner = kwargs if isinstance(layer, Network) and layer._takes_keywords() else {}
                    streams = evaluate((layer,), streams, storage, **inner)
                    streams = widened(streams) if widens(layer, above) else streams
        return single(streams)

    def _takes_keywords(self) -> bool:
        """Return whether there are reversible layers in this network or in networks inside it."""
        return any(isinstance(x, ReversibleLayer) or (isinstance(x, Network) and x._takes_keywords()) for x in self)


def _stored(layer: ReversibleLayer, streams: Streams, storage: str | None, **kwargs: Any) -> Streams:
    """Apply a reversible layer whose inputs are not reconstructed."""
    tensors, keywords = Keywords.flatten(kwargs)
    couplings = [coupling.with_keywords(keywords) for coupling in layer.couplings()]
    found = evaluate(couplings, (*streams, *tensors), storage)
    return found[: len(found) - len(tensors)]


def segments(layers: Iterable[nn.Module]) -> Iterator[tuple[str | None, list[nn.Module]]]:
    """Divide layers into maximal segments of one storage."""
    for storage, segment in groupby(layers, storage_of):
        yield storage, list(segment)


def widens(layer: nn.Module, above: nn.Module | None) -> bool:
    """Return whether the outputs of a layer are widened to float32 under autocast.

    They are not if the layer above narrows them again (`narrowed`), or if the attribute `narrow_outputs` of the layer
    is true: the last layer may leave them to a loss in the autocast dtype.
    """
    return not getattr(above, "narrows", False) and not getattr(layer, "narrow_outputs", False)
