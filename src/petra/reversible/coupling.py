"""Couplings: the invertible steps that reversible layers are made of.

A coupling maps streams to streams, back again, and takes gradients back through itself while it
reconstructs its inputs. It holds no parameters and no state of its own: it is a view on the functions
of the layer it belongs to.

The first two streams are coupled. Those after them are companions, for example a mask: they pass every
coupling unchanged and are handed to its functions as further arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from petra.reversible.arguments import NO_KEYWORDS, Keywords
from petra.reversible.gradients import ParameterGradients, Reversal, trainable, vjp
from petra.reversible.reach import check_reach
from petra.reversible.streams import Gradients, Streams, T, leaves

C = TypeVar("C", bound="Coupling")


class Rewound(NamedTuple):
    """A coupling after its inputs were reconstructed and before gradients were taken through it."""

    inputs: Streams
    take: Callable[[Gradients], tuple[Gradients, ParameterGradients]]
    """Gradients of the inputs and parameters from those of the outputs."""


@dataclass(frozen=True)
class Coupling(ABC):
    """An invertible step."""

    keywords: Keywords = field(default=NO_KEYWORDS, kw_only=True)
    """Which companions its functions want by name."""

    @property
    @abstractmethod
    def modules(self) -> tuple[nn.Module, ...]:
        """The functions that it evaluates, each once per direction."""

    @property
    def unread(self) -> tuple[int, ...]:
        """The streams on whose values gradients do not depend."""
        return ()

    @abstractmethod
    def forward(self, streams: Streams) -> Streams:
        """Outputs from inputs."""

    @abstractmethod
    def inverse(self, streams: Streams) -> Streams:
        """Inputs from outputs."""

    @abstractmethod
    def rewind(self, streams: Streams) -> Rewound:
        """Inputs from outputs, with what it takes to go on with gradients.

        Of the companions, those that require gradients get them.
        """

    def reverse(self, streams: Streams, gradients: Gradients) -> Reversal:
        """Inputs, their gradients and the parameters' gradients from outputs and their gradients."""
        rewound = self.rewind(streams)
        return Reversal(rewound.inputs, *rewound.take(gradients))

    def named(self: C, keywords: Keywords) -> C:
        """The same coupling, whose functions take the last companions by name."""
        return self if keywords is self.keywords else replace(self, keywords=keywords)


@dataclass(frozen=True)
class TwoStream(Coupling):
    """Changes one stream, the target, by a function of the other, the source.

    With ``swap`` the two streams then change places, which makes one such step after another mix both.
    """

    function: nn.Module
    source: int
    target: int
    swap: bool = False

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.function,)

    @abstractmethod
    def _change(self, target: Tensor, found: Any) -> Tensor:
        """The new target from what the function has found."""

    @abstractmethod
    def _restore(self, target: Tensor, found: Any) -> Tensor:
        """The old target."""

    @abstractmethod
    def _through(self, target: Tensor, found: Any, gradient: Tensor) -> tuple[Tensor, Streams, Gradients]:
        """The gradient of the old target, what the function has found and its gradients; ``target`` is the old."""

    def forward(self, streams: Streams) -> Streams:
        _check_pair(streams)
        source, target, companions = streams[self.source], streams[self.target], streams[2:]
        found = self._evaluate(source, target, companions)
        return (*self._place(source, self._change(target, found), self.swap), *companions)

    def inverse(self, streams: Streams) -> Streams:
        source, target, companions = self._pick(streams)
        found = self._evaluate(source, target, companions)
        return (*self._place(source, self._restore(target, found)), *companions)

    def rewind(self, streams: Streams) -> Rewound:
        # RevNet, Alg. 1: the evaluation that reconstructs the target also carries the graph of the vjp,
        # so the function runs once.
        source, target, companions = self._pick(streams)
        (leaf,) = leaves((source,))
        handed = tuple(c.detach().requires_grad_(c.requires_grad) for c in companions)
        with torch.enable_grad():
            found = self._evaluate(leaf, target, handed)
        with torch.no_grad():
            restored = self._restore(target.detach(), found)

        def take(gradients: Gradients) -> tuple[Gradients, ParameterGradients]:
            source_gradient, target_gradient, rest = self._pick(gradients)
            if target_gradient is None:
                return (*self._place(source_gradient, None), *rest), {}
            with torch.no_grad():
                target_gradient, outputs, into = self._through(restored, found, target_gradient)
            own = trainable(self.modules)
            check_reach(self.function, outputs, (leaf, *handed, *own))
            _, (through, *more), parameters = vjp(outputs, (leaf, *handed), own, into)
            rest = tuple(_sum(a, b) for a, b in zip(rest, more, strict=True))
            return (*self._place(_sum(source_gradient, through), target_gradient), *rest), parameters

        return Rewound((*self._place(source.detach(), restored), *companions), take)

    def _evaluate(self, source: Tensor, target: Tensor, companions: Streams) -> Any:
        version = None if source.is_inference() else source._version
        found = self.keywords.call(self.function, source, companions)
        if version is not None and source._version != version:
            raise ValueError(
                f"{type(self.function).__name__} changes its input in place, but a reversible block passes that input "
                "on: begin with an out-of-place operation, for example nn.ReLU() instead of nn.ReLU(inplace=True)"
            )
        self._check(found, target)
        return found

    def _check(self, found: Any, target: Tensor) -> None:
        if not isinstance(found, Tensor):
            raise ValueError(
                f"{type(self.function).__name__} gives {type(found).__name__}: a residual function returns one tensor, "
                "so wrap modules that return more, such as attention with its weights, in one that returns the first"
            )
        if found.shape != target.shape:
            raise ValueError(
                f"{type(self.function).__name__} gives {tuple(found.shape)} for a stream of {tuple(target.shape)}: "
                "a residual function must give the shape of the stream that it is added to"
            )

    def _pick(self, given: tuple[T, ...]) -> tuple[T, T, tuple[T, ...]]:
        _check_pair(given)
        source, target = given[self.source], given[self.target]
        return (target, source, given[2:]) if self.swap else (source, target, given[2:])

    def _place(self, source: T, target: T, swap: bool = False) -> tuple[T, T]:
        placed = (source, target) if self.source < self.target else (target, source)
        return (placed[1], placed[0]) if swap else placed


@dataclass(frozen=True)
class Additive(TwoStream):
    """target ← target + function(source)."""

    @property
    def unread(self) -> tuple[int, ...]:
        return (self.target,)

    def _change(self, target: Tensor, found: Tensor) -> Tensor:
        return target + found

    def _restore(self, target: Tensor, found: Tensor) -> Tensor:
        return target - found

    def _through(self, target: Tensor, found: Tensor, gradient: Tensor) -> tuple[Tensor, Streams, Gradients]:
        return gradient, (found,), (gradient,)


@dataclass(frozen=True)
class Affine(TwoStream):
    """target ← target · exp(s) + t, with (s, t) = function(source): RealNVP's coupling (Dinh et al., 2017)."""

    def _change(self, target: Tensor, found: tuple[Tensor, Tensor]) -> Tensor:
        log_scale, shift = (x.to(target.dtype) for x in found)  # a scale in bfloat16 is not undone by its inverse
        return target * log_scale.exp() + shift

    def _restore(self, target: Tensor, found: tuple[Tensor, Tensor]) -> Tensor:
        log_scale, shift = (x.to(target.dtype) for x in found)
        return (target - shift) * (-log_scale).exp()

    def _through(
        self, target: Tensor, found: tuple[Tensor, Tensor], gradient: Tensor
    ) -> tuple[Tensor, Streams, Gradients]:
        through = gradient * found[0].to(target.dtype).exp().conj()  # of itself, unless it is complex
        return through, found, (through * target.conj(), gradient)

    def _check(self, found: Any, target: Tensor) -> None:
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(
                f"{type(self.function).__name__} gives {type(found).__name__}: "
                "the function of an affine coupling returns two tensors, the logarithm of a scale and a shift"
            )
        for part in found:
            super()._check(part, target)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _check_pair(streams: tuple[object, ...]) -> None:
    if len(streams) < 2:
        raise ValueError(f"a reversible block takes two streams, not {len(streams)}: split the input before it")
