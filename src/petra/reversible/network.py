"""A network as a list of layers: the form that every training method of Petra can cut and run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from petra.reversible.backprop import reversible_run
from petra.reversible.capture import Captures
from petra.reversible.coupling import TwoStream
from petra.reversible.layer import ReversibleBlock, ReversibleLayer, ReversibleResidual
from petra.reversible.streams import Streams, as_streams, single, widened


class Network(nn.Sequential):
    """Layers one after the other, with streams flowing between them.

    An ``nn.Sequential`` whose layers may take and give several tensors. Each run of reversible layers
    is one node of the autograd graph that stores only its last output, so ``loss.backward()`` gives
    exact gradients with memory that does not grow with the number of reversible layers. Keyword arguments reach
    the residual functions of all reversible layers, also in networks that are layers of this one.
    """

    captures: Captures | None = None

    def capture(self, on: bool = True) -> Self:
        """Record each reversible run as CUDA graphs when it first meets inputs of a kind, and replay them from then on.

        For networks of many small kernels on a GPU; elsewhere it changes nothing. Memory of a recorded run stays taken.
        Residual functions must not draw random numbers, and parameters must stay the same tensors.
        """
        self.captures = Captures() if on else None
        return self

    def use_coupling(self, coupling: type[TwoStream]) -> Self:
        """Couple the streams of all reversible blocks in another way, for example exactly with `petra.FixedPoint`."""
        if not callable(coupling):
            raise ValueError(f"coupling is {coupling!r}: give a class like petra.FixedPoint or petra.Additive")
        for layer in self.modules():
            if isinstance(layer, ReversibleBlock | ReversibleResidual):
                layer.coupling = coupling
        return self

    def compile_functions(self, **options: Any) -> Self:
        """`torch.compile` for the residual functions of reversible layers and for all other layers, in place.

        Shapes are not taken for dynamic unless ``options`` say so: layers of one class differ in theirs.
        """
        # Functions of one class share their compiled code, one version for each shape, mode and kind of their parts.
        config = torch._dynamo.config
        limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # of PyTorch 2.6
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

    def forward(self, *inputs: Tensor, **named: Any) -> Tensor | Streams:
        streams = widened(as_streams(inputs))
        if named and not self._takes_names():
            raise ValueError(
                f"{', '.join(named)} given by name, but only functions of reversible layers take arguments so, and "
                "there are none: pass them on as streams, from layer to layer"
            )
        for reversible, layers in runs(self):
            if reversible:
                streams = reversible_run(cast(list[ReversibleLayer], layers), streams, self.captures, **named)
            else:
                for layer, above in zip(layers, [*layers[1:], None], strict=True):
                    inner = named if isinstance(layer, Network) and layer._takes_names() else {}
                    streams = as_streams(layer(*streams, **inner))
                    streams = streams if getattr(above, "narrows", False) else widened(streams)
        return single(streams)

    def _takes_names(self) -> bool:
        """Whether there are reversible layers in it, or in networks inside it."""
        return any(isinstance(x, ReversibleLayer) or (isinstance(x, Network) and x._takes_names()) for x in self)


def runs(layers: Iterable[nn.Module]) -> Iterator[tuple[bool, list[nn.Module]]]:
    """Cut layers into the longest runs that are all reversible or all not."""
    for reversible, run in groupby(layers, lambda layer: isinstance(layer, ReversibleLayer)):
        yield reversible, list(run)
