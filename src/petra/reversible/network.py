"""A network as a list of layers: the form that every training method of Petra can cut and run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, cast

from torch import Tensor, nn

from petra.reversible.backprop import reversible_run
from petra.reversible.layer import ReversibleLayer
from petra.reversible.streams import Streams, as_streams, single


class Network(nn.Sequential):
    """Layers one after the other, with streams flowing between them.

    An ``nn.Sequential`` whose layers may take and give several tensors. Each run of reversible layers
    is one node of the autograd graph that stores only its last output, so ``loss.backward()`` gives
    exact gradients with memory that does not grow with the number of reversible layers. Keyword arguments reach
    the residual functions of all reversible layers.
    """

    def forward(self, *inputs: Tensor, **named: Any) -> Tensor | Streams:
        streams = inputs
        for reversible, layers in runs(self):
            if reversible:
                streams = reversible_run(cast(list[ReversibleLayer], layers), streams, **named)
            else:
                for layer in layers:
                    streams = as_streams(layer(*streams))
        return single(streams)


def runs(layers: Iterable[nn.Module]) -> Iterator[tuple[bool, list[nn.Module]]]:
    """Cut layers into the longest runs that are all reversible or all not."""
    for reversible, run in groupby(layers, lambda layer: isinstance(layer, ReversibleLayer)):
        yield reversible, list(run)
