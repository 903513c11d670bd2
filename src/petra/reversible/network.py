"""A network as a list of layers: the form that every training method of Petra can cut and run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import cast

import torch
from torch import Tensor, nn

from petra.reversible.backprop import reversible_run
from petra.reversible.coupling import Streams
from petra.reversible.layer import ReversibleLayer


class Network(nn.Sequential):
    """Layers one after the other, with streams flowing between them.

    An ``nn.Sequential`` whose layers may take and give several tensors. Each run of reversible layers
    is one node of the autograd graph that stores only its last output, so ``loss.backward()`` gives
    exact gradients with memory that does not grow with the number of reversible layers.
    """

    def forward(self, *inputs: Tensor) -> Tensor | Streams:
        streams = inputs
        for reversible, layers in runs(self):
            if reversible:
                streams = reversible_run(cast(list[ReversibleLayer], layers), streams)
            else:
                for layer in layers:
                    streams = as_streams(layer(*streams))
        return streams[0] if len(streams) == 1 else streams


def runs(layers: Iterable[nn.Module]) -> Iterator[tuple[bool, list[nn.Module]]]:
    """Cut layers into the longest runs that are all reversible or all not."""
    for reversible, run in groupby(layers, lambda layer: isinstance(layer, ReversibleLayer)):
        yield reversible, list(run)


def as_streams(output: Tensor | Streams) -> Streams:
    """A layer's output as a tuple; under autocast in float32.

    Streams are added to over many layers, and reversible layers subtract again what they added:
    both need the precision, while the residual functions can do with less.
    """
    streams = (output,) if isinstance(output, Tensor) else tuple(output)
    kind = streams[0].device.type if streams else "cpu"
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        low = (torch.float16, torch.bfloat16)
        streams = tuple(x.float() if x.dtype in low else x for x in streams)
    return streams
