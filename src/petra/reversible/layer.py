"""Reversible layers: modules whose inputs can be computed from their outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from petra.reversible.coupling import Additive, Coupling, Whole
from petra.reversible.streams import Streams


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
