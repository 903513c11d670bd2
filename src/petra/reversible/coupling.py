"""Couplings: the invertible steps that reversible layers are made of.

A coupling maps streams to streams and back, and computes gradients while it reconstructs its inputs. It has no
parameters and no state: it is a view on the functions of its layer.

The first two streams are coupled. The streams after them are companions, for example a mask: they pass every coupling
unchanged, and its functions receive them as further arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from petra.reversible.gradients import ParameterGradients, Reversal, trainable, vjp
from petra.reversible.graph_leaks import check_graph_leaks
from petra.reversible.keyword_arguments import NO_KEYWORDS, Keywords
from petra.reversible.streams import Gradients, Streams, T, leaves

C = TypeVar("C", bound="Coupling")


class Reconstructed(NamedTuple):
    """The first half of a coupling's reverse pass: inputs are reconstructed, gradients are not yet computed."""

    inputs: Streams
    """The reconstructed inputs."""
    backward: Callable[[Gradients], tuple[Gradients, ParameterGradients]]
    """Computes the gradients of inputs and parameters from those of the outputs."""


@dataclass(frozen=True)
class Coupling(ABC):
    """An invertible step of a reversible layer."""

    keywords: Keywords = field(default=NO_KEYWORDS, kw_only=True)
    """The companions that its functions receive as keyword arguments."""

    @property
    @abstractmethod
    def modules(self) -> tuple[nn.Module, ...]:
        """The functions that it evaluates, each once per direction."""

    @property
    def unread(self) -> tuple[int, ...]:
        """The streams on whose values the gradients do not depend."""
        return ()

    @abstractmethod
    def forward(self, streams: Streams) -> Streams:
        """Compute outputs from inputs.

        Args:
            streams: The inputs, followed by companions.

        Returns:
            The outputs, followed by the same companions.
        """

    @abstractmethod
    def inverse(self, streams: Streams) -> Streams:
        """Compute inputs from outputs.

        Args:
            streams: The outputs, followed by companions.

        Returns:
            The inputs, followed by the same companions.
        """

    @abstractmethod
    def reconstruct(self, streams: Streams) -> Reconstructed:
        """Compute inputs from outputs and keep the graph that gradients need.

        Args:
            streams: The outputs, followed by companions. Companions that require gradients get them.

        Returns:
            The inputs, and a function that computes gradients.
        """

    def reverse(self, streams: Streams, gradients: Gradients) -> Reversal:
        """Compute inputs and all gradients from outputs and their gradients.

        Args:
            streams: The outputs, followed by companions.
            gradients: A gradient for each of them; None stands for zero.

        Returns:
            The inputs, their gradients, and the gradients of the parameters.
        """
        reconstructed = self.reconstruct(streams)
        return Reversal(reconstructed.inputs, *reconstructed.backward(gradients))

    def with_keywords(self: C, keywords: Keywords) -> C:
        """Return the same coupling with functions that receive the last companions as keyword arguments.

        Args:
            keywords: The structure of the keyword arguments.

        Returns:
            A coupling that shares its functions with this one.
        """
        return self if keywords is self.keywords else replace(self, keywords=keywords)


@dataclass(frozen=True)
class TwoStreamCoupling(Coupling):
    """Changes one stream, the target, by a function of the other stream, the source.

    With `swap`, the two streams then change places, so that a sequence of such couplings changes both.
    """

    function: nn.Module
    """The residual function."""
    source: int
    """The index of the stream that the function receives: 0 or 1."""
    target: int
    """The index of the stream that changes: 1 or 0."""
    swap: bool = False
    """True if the streams change places afterwards."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.function,)

    @abstractmethod
    def _change(self, target: Tensor, output: Any) -> Tensor:
        """Return the new target from the old one and the output of the function."""

    @abstractmethod
    def _restore(self, target: Tensor, output: Any) -> Tensor:
        """Return the old target from the new one and the output of the function."""

    @abstractmethod
    def _target_vjp(self, target: Tensor, output: Any, gradient: Tensor) -> tuple[Tensor, Streams, Gradients]:
        """Return the gradient of the old `target`, and the outputs of the function with their gradients."""

    def forward(self, streams: Streams) -> Streams:
        _check_pair(streams)
        source, target, companions = streams[self.source], streams[self.target], streams[2:]
        output = self._evaluate(source, target, companions)
        return (*self._pair(source, self._change(target, output), self.swap), *companions)

    def inverse(self, streams: Streams) -> Streams:
        source, target, companions = self._unpack(streams)
        output = self._evaluate(source, target, companions)
        return (*self._pair(source, self._restore(target, output)), *companions)

    def reconstruct(self, streams: Streams) -> Reconstructed:
        # RevNet, Alg. 1: the evaluation that reconstructs the target also builds the graph for the vjp,
        # so the function is evaluated once.
        source, target, companions = self._unpack(streams)
        (leaf,) = leaves((source,))
        arguments = tuple(c.detach().requires_grad_(c.requires_grad) for c in companions)
        with torch.enable_grad():
            output = self._evaluate(leaf, target, arguments)
        with torch.no_grad():
            restored = self._restore(target.detach(), output)

        def backward(gradients: Gradients) -> tuple[Gradients, ParameterGradients]:
            source_gradient, target_gradient, rest = self._unpack(gradients)
            if target_gradient is None:
                return (*self._pair(source_gradient, None), *rest), {}
            with torch.no_grad():
                target_gradient, outputs, into = self._target_vjp(restored, output, target_gradient)
            own = trainable(self.modules)
            check_graph_leaks(self.function, outputs, (leaf, *arguments, *own))
            _, (through, *more), parameters = vjp(outputs, (leaf, *arguments), own, into)
            rest = tuple(_sum(a, b) for a, b in zip(rest, more, strict=True))
            return (*self._pair(_sum(source_gradient, through), target_gradient), *rest), parameters

        return Reconstructed((*self._pair(source.detach(), restored), *companions), backward)

    def _evaluate(self, source: Tensor, target: Tensor, companions: Streams) -> Any:
        unknown = torch.compiler.is_compiling() or source.is_inference()
        version = None if unknown else source._version
        output = self.keywords.call(self.function, source, companions)
        if version is not None and source._version != version:
            raise ValueError(
                f"{type(self.function).__name__} changes its input in place, but a reversible block passes that input "
                "on: begin with an out-of-place operation, for example nn.ReLU() instead of nn.ReLU(inplace=True)"
            )
        self._check(output, target)
        return output

    def _check(self, output: Any, target: Tensor) -> None:
        if not isinstance(output, Tensor):
            raise ValueError(
                f"{type(self.function).__name__} returns {type(output).__name__}, but a residual function must return "
                "one tensor: wrap modules that return more, such as attention with its weights, in a module that "
                "returns the first output"
            )
        if output.shape != target.shape:
            raise ValueError(
                f"{type(self.function).__name__} returns shape {tuple(output.shape)} for a stream of shape "
                f"{tuple(target.shape)}: a residual function must return the shape of the stream that it is added to"
            )

    def _unpack(self, outputs: tuple[T, ...]) -> tuple[T, T, tuple[T, ...]]:
        """Return source, target and companions of the outputs."""
        _check_pair(outputs)
        source, target = outputs[self.source], outputs[self.target]
        return (target, source, outputs[2:]) if self.swap else (source, target, outputs[2:])

    def _pair(self, source: T, target: T, swap: bool = False) -> tuple[T, T]:
        """Return source and target in the order of the streams."""
        pair = (source, target) if self.source < self.target else (target, source)
        return (pair[1], pair[0]) if swap else pair


@dataclass(frozen=True)
class AdditiveCoupling(TwoStreamCoupling):
    """target ← target + function(source)."""

    @property
    def unread(self) -> tuple[int, ...]:
        return (self.target,)

    def _change(self, target: Tensor, output: Tensor) -> Tensor:
        return target + output

    def _restore(self, target: Tensor, output: Tensor) -> Tensor:
        return target - output

    def _target_vjp(self, target: Tensor, output: Tensor, gradient: Tensor) -> tuple[Tensor, Streams, Gradients]:
        return gradient, (output,), (gradient,)


@dataclass(frozen=True)
class AffineCoupling(TwoStreamCoupling):
    """target ← target · exp(s) + t, with (s, t) = function(source): RealNVP's coupling (Dinh et al., 2017)."""

    def _change(self, target: Tensor, output: tuple[Tensor, Tensor]) -> Tensor:
        log_scale, shift = (x.to(target.dtype) for x in output)  # a scale in bfloat16 is not undone by its inverse
        return target * log_scale.exp() + shift

    def _restore(self, target: Tensor, output: tuple[Tensor, Tensor]) -> Tensor:
        log_scale, shift = (x.to(target.dtype) for x in output)
        return (target - shift) * (-log_scale).exp()

    def _target_vjp(
        self, target: Tensor, output: tuple[Tensor, Tensor], gradient: Tensor
    ) -> tuple[Tensor, Streams, Gradients]:
        through = gradient * output[0].to(target.dtype).exp().conj()  # conj matters for complex streams only
        return through, output, (through * target.conj(), gradient)

    def _check(self, output: Any, target: Tensor) -> None:
        if not isinstance(output, tuple) or len(output) != 2:
            raise ValueError(
                f"{type(self.function).__name__} returns {type(output).__name__}, but the function of an affine "
                "coupling must return two tensors: return the logarithm of a scale and a shift"
            )
        for part in output:
            super()._check(part, target)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _check_pair(streams: tuple[object, ...]) -> None:
    if len(streams) < 2:
        raise ValueError(f"a reversible block takes two streams, not {len(streams)}: split the input before it")
