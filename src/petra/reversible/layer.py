"""Reversible layers: modules whose inputs can be computed from their outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from petra.reversible.arguments import Keywords
from petra.reversible.coupling import Additive, Coupling, Rewound, TwoStream
from petra.reversible.gradients import ParameterGradients, trainable, vjp
from petra.reversible.randomness import random_state, restore_random_state
from petra.reversible.reach import check_reach
from petra.reversible.statistics import frozen_statistics, normalisations
from petra.reversible.streams import Gradients, Streams, as_streams, differentiable, leaves, widened


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
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.layer,)

    def forward(self, streams: Streams) -> Streams:
        return self._call(self.layer, streams)

    def inverse(self, streams: Streams) -> Streams:
        return self._call(self.layer.inverse, streams)

    def _call(self, direction: Callable[..., Streams], streams: Streams) -> Streams:
        found = widened(as_streams(self.keywords.call(direction, streams[0], streams[1:])))
        return (*found, *streams[len(streams) - self.keywords.tensors :])

    def rewind(self, streams: Streams) -> Rewound:
        device = streams[0].device
        state = random_state(device)
        with torch.no_grad(), frozen_statistics(normalisations(self.modules)):
            inputs = self.inverse(streams)
        restore_random_state(device, state)
        # The layer may have made more streams of less; what comes after those that change belongs together from behind.
        more, count = len(streams) - len(inputs), len(inputs) - self.keywords.tensors
        named = streams[count + more :]
        handed = *leaves(inputs[:count]), *(x.detach().requires_grad_(x.requires_grad) for x in named)
        with torch.enable_grad():
            outputs = self.forward(handed)

        def take(gradients: Gradients) -> tuple[Gradients, ParameterGradients]:
            own = trainable(self.modules)
            check_reach(self.layer, outputs, (*handed, *own))
            _, found, parameters = vjp(outputs, handed, own, gradients)
            return found, parameters

        # Companions that want gradients want them of the layers below, too.
        wanted = [i + more >= 0 and streams[i + more].requires_grad for i in range(count)]
        restored = (x.detach() for x in inputs[:count])
        return Rewound(
            (*(x.requires_grad_(want and differentiable(x)) for x, want in zip(restored, wanted, strict=True)), *named),
            take,
        )


class CoupledLayer(ReversibleLayer):
    """A reversible layer that is a sequence of couplings."""

    @abstractmethod
    def couplings(self) -> tuple[Coupling, ...]: ...

    def forward(self, *streams: Tensor, **named: Any) -> Streams:
        tensors, keywords = Keywords.take_apart(named)
        found = (*streams, *tensors)
        for coupling in self.couplings():
            found = coupling.named(keywords).forward(found)
        return found[: len(found) - len(tensors)]

    def inverse(self, *streams: Tensor, **named: Any) -> Streams:
        tensors, keywords = Keywords.take_apart(named)
        found = (*streams, *tensors)
        for coupling in reversed(self.couplings()):
            found = coupling.named(keywords).inverse(found)
        return found[: len(found) - len(tensors)]


class ReversibleResidual(CoupledLayer):
    """PETRA's block with one residual function: (x, x̃) → (x̃ + f(x), x)."""

    def __init__(self, f: nn.Module, coupling: type[TwoStream] = Additive) -> None:
        super().__init__()
        _refuse_functions(f)
        self.f = f
        self.coupling = coupling

    def couplings(self) -> tuple[Coupling, ...]:
        return (self.coupling(self.f, source=0, target=1, swap=True),)


class ReversibleBlock(CoupledLayer):
    """RevNet's block with two residual functions: y1 = x1 + f(x2), y2 = x2 + g(y1).

    Streams after the first two are handed to f and g as further arguments and passed on as they are. With ``coupling``
    `Affine`, f and g return the logarithm of a scale and a shift; with `FixedPoint`, the inverse is exact to the bit.
    """

    def __init__(self, f: nn.Module, g: nn.Module, coupling: type[TwoStream] = Additive) -> None:
        super().__init__()
        _refuse_functions(f, g)
        self.f = f
        self.g = g
        self.coupling = coupling

    def couplings(self) -> tuple[Coupling, ...]:
        return (self.coupling(self.f, source=1, target=0), self.coupling(self.g, source=0, target=1))


def _refuse_functions(*parts: object) -> None:
    for part in parts:
        if not isinstance(part, nn.Module):
            raise ValueError(
                f"{part!r} is not an nn.Module: give residual functions as modules, so that their weights are found"
            )
