"""Reversible layers: modules whose inputs can be computed from their outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from petra.reversible.coupling import AdditiveCoupling, Coupling, Reconstructed, TwoStreamCoupling
from petra.reversible.gradients import ParameterGradients, trainable, vjp
from petra.reversible.graph_leaks import check_graph_leaks
from petra.reversible.keyword_arguments import Keywords
from petra.reversible.module_state import frozen_statistics, normalisations
from petra.reversible.randomness import random_state, restore_random_state
from petra.reversible.streams import Gradients, Streams, as_streams, differentiable, leaves, widened


class ReversibleLayer(nn.Module, ABC):
    """A layer with an exact `inverse`.

    To write your own, implement `forward(*streams)` and `inverse(*streams)`, both returning a tuple, and test the layer
    with `petra.check_invertible`. A layer that is a sequence of couplings derives from `CoupledLayer` instead and
    implements `couplings` only.
    """

    @abstractmethod
    def forward(self, *streams: Tensor) -> Streams:
        """Compute outputs from inputs.

        Args:
            streams: The inputs.

        Returns:
            The outputs.
        """

    @abstractmethod
    def inverse(self, *streams: Tensor) -> Streams:
        """Compute inputs from outputs.

        Args:
            streams: The outputs.

        Returns:
            The inputs.
        """

    def couplings(self) -> tuple[Coupling, ...]:
        """Return the invertible steps of the layer.

        Returns:
            The couplings in forward order.
        """
        return (CustomCoupling(self),)


@dataclass(frozen=True)
class CustomCoupling(Coupling):
    """A layer that implements `forward` and `inverse` itself, as one coupling.

    Its reverse pass evaluates the layer twice: once to invert it, and once for the graph.
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

    def reconstruct(self, streams: Streams) -> Reconstructed:
        device = streams[0].device
        state = random_state(device)
        with torch.no_grad(), frozen_statistics(normalisations(self.modules)):
            inputs = self.inverse(streams)
        restore_random_state(device, state)
        # The layer may return more or fewer streams than it takes; companions correspond when counted from the end.
        more, count = len(streams) - len(inputs), len(inputs) - self.keywords.tensors
        keyword_tensors = streams[count + more :]
        arguments = (
            *leaves(inputs[:count]),
            *(x.detach().requires_grad_(x.requires_grad) for x in keyword_tensors),
        )
        with torch.enable_grad():
            outputs = self.forward(arguments)

        def backward(gradients: Gradients) -> tuple[Gradients, ParameterGradients]:
            own = trainable(self.modules)
            check_graph_leaks(self.layer, outputs, (*arguments, *own))
            _, found, parameters = vjp(outputs, arguments, own, gradients)
            return found, parameters

        # Companions that require gradients also require them in the layers below.
        wanted = [i + more >= 0 and streams[i + more].requires_grad for i in range(count)]
        restored = (x.detach() for x in inputs[:count])
        return Reconstructed(
            (
                *(x.requires_grad_(want and differentiable(x)) for x, want in zip(restored, wanted, strict=True)),
                *keyword_tensors,
            ),
            backward,
        )


class CoupledLayer(ReversibleLayer):
    """A reversible layer that is a sequence of couplings."""

    @abstractmethod
    def couplings(self) -> tuple[Coupling, ...]: ...

    def forward(self, *streams: Tensor, **kwargs: Any) -> Streams:
        """Compute outputs from inputs.

        Args:
            streams: The inputs, followed by companions.
            kwargs: Keyword arguments for all residual functions.

        Returns:
            The outputs, followed by the same companions.
        """
        tensors, keywords = Keywords.flatten(kwargs)
        found = (*streams, *tensors)
        for coupling in self.couplings():
            found = coupling.with_keywords(keywords).forward(found)
        return found[: len(found) - len(tensors)]

    def inverse(self, *streams: Tensor, **kwargs: Any) -> Streams:
        """Compute inputs from outputs.

        Args:
            streams: The outputs, followed by companions.
            kwargs: The keyword arguments of the forward pass.

        Returns:
            The inputs, followed by the same companions.
        """
        tensors, keywords = Keywords.flatten(kwargs)
        found = (*streams, *tensors)
        for coupling in reversed(self.couplings()):
            found = coupling.with_keywords(keywords).inverse(found)
        return found[: len(found) - len(tensors)]


class ReversibleResidual(CoupledLayer):
    """PETRA's block with one residual function: (x, x̃) → (x̃ + f(x), x).

    Streams after the first two are companions: f receives them as further arguments, and they are passed on unchanged.

    Args:
        f: The residual function.
        coupling: The kind of coupling, for example `AffineCoupling`; see `ReversibleBlock`.

    Raises:
        ValueError: If f is not an `nn.Module`.
    """

    def __init__(self, f: nn.Module, coupling: type[TwoStreamCoupling] = AdditiveCoupling) -> None:
        super().__init__()
        _check_modules(f)
        self.f = f
        self.coupling = coupling

    def couplings(self) -> tuple[Coupling, ...]:
        return (self.coupling(self.f, source=0, target=1, swap=True),)


class ReversibleBlock(CoupledLayer):
    """RevNet's block with two residual functions: y1 = x1 + f(x2), y2 = x2 + g(y1).

    Streams after the first two are companions: f and g receive them as further arguments, and they are passed on
    unchanged.

    Args:
        f: The first residual function.
        g: The second residual function.
        coupling: The kind of coupling. With `AffineCoupling`, f and g return the logarithm of a scale and a shift; with
            `FixedPointCoupling`, the inverse is exact to the bit.

    Raises:
        ValueError: If f or g is not an `nn.Module`.
    """

    def __init__(self, f: nn.Module, g: nn.Module, coupling: type[TwoStreamCoupling] = AdditiveCoupling) -> None:
        super().__init__()
        _check_modules(f, g)
        self.f = f
        self.g = g
        self.coupling = coupling

    def couplings(self) -> tuple[Coupling, ...]:
        return (self.coupling(self.f, source=1, target=0), self.coupling(self.g, source=0, target=1))


def _check_modules(*functions: object) -> None:
    for function in functions:
        if not isinstance(function, nn.Module):
            raise ValueError(
                f"{function!r} is not an nn.Module: give residual functions as modules, so that their parameters are "
                "registered"
            )
