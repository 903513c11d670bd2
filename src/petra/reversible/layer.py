"""Reversible layers: modules whose inputs can be computed from their outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petra.reversible.coupling import Additive, Coupling
from petra.reversible.gradients import Reversal, trainable, vjp
from petra.reversible.randomness import random_state, restore_random_state
from petra.reversible.statistics import frozen_statistics, normalisations
from petra.reversible.streams import Gradients, Streams, as_streams, leaves


class ReversibleLayer(nn.Module, ABC):
    """A layer with an exact ``inverse``.

    To make one of your own, write ``forward(*streams)`` and ``inverse(*streams)``, both returning a
    tuple, and hold the result against `petra.check_invertible`. Layers that are a sequence of couplings
    override `couplings` instead and inherit both directions.
    """

    @abstractmethod
    def forward(self, *streams: Tensor) -> Streams:
        """Outputs from inputs."""

    @abstractmethod
    def inverse(self, *streams: Tensor) -> Streams:
        """Inputs from outputs."""

    def couplings(self) -> tuple[Coupling, ...]:
        """The steps of the layer, in forward order."""
        return (Whole(self),)


@dataclass(frozen=True)
class Whole(Coupling):
    """A layer of the user's own that brings ``forward`` and ``inverse``, taken as one step.

    Taking gradients back evaluates it twice: once to invert, once for the graph.
    """

    layer: ReversibleLayer

    @property
    def modules(self) -> tuple[nn.Module, ...]:  # type: ignore[override]
        return (self.layer,)

    def forward(self, streams: Streams) -> Streams:
        return as_streams(self.layer(*streams))

    def inverse(self, streams: Streams) -> Streams:
        return as_streams(self.layer.inverse(*streams))

    def reverse(self, streams: Streams, gradients: Gradients) -> Reversal:
        device = streams[0].device
        state = random_state(device)
        with torch.no_grad(), frozen_statistics(normalisations(self.modules)):
            inputs = leaves(self.inverse(streams))
        restore_random_state(device, state)
        with torch.enable_grad():
            outputs = self.forward(inputs)
        found = vjp(outputs, inputs, trainable(self.modules), gradients)
        return found._replace(inputs=tuple(x.detach() for x in inputs))


class CoupledLayer(ReversibleLayer):
    """A reversible layer that is a sequence of couplings."""

    @abstractmethod
    def couplings(self) -> tuple[Coupling, ...]: ...

    def forward(self, *streams: Tensor) -> Streams:
        for coupling in self.couplings():
            streams = coupling.forward(streams)
        return streams

    def inverse(self, *streams: Tensor) -> Streams:
        for coupling in reversed(self.couplings()):
            streams = coupling.inverse(streams)
        return streams


class ReversibleResidual(CoupledLayer):
    """PETRA's block with one residual function: (x, x̃) → (x̃ + f(x), x)."""

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def couplings(self) -> tuple[Coupling, ...]:
        return (Additive(self.f, source=0, target=1, swap=True),)


class ReversibleBlock(CoupledLayer):
    """RevNet's block with two residual functions: y1 = x1 + f(x2), y2 = x2 + g(y1)."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def couplings(self) -> tuple[Coupling, ...]:
        return (Additive(self.f, source=1, target=0), Additive(self.g, source=0, target=1))
