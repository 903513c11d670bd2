"""Couplings: the invertible steps that reversible layers are made of.

A coupling maps streams to streams, back again, and takes gradients back through itself while it
reconstructs its inputs. It holds no parameters and no state of its own: it is a view on the functions
of the layer it belongs to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petra.reversible.gradients import Reversal, trainable, vjp
from petra.reversible.streams import Gradients, Streams, T, leaves


class Coupling(ABC):
    """An invertible step."""

    modules: tuple[nn.Module, ...]
    """The functions that it evaluates, each once per direction."""
    reads: tuple[int, ...] | None = None
    """The streams on whose values gradients depend, if not on all."""

    @abstractmethod
    def forward(self, streams: Streams) -> Streams:
        """Outputs from inputs."""

    @abstractmethod
    def inverse(self, streams: Streams) -> Streams:
        """Inputs from outputs."""

    @abstractmethod
    def reverse(self, streams: Streams, gradients: Gradients) -> Reversal:
        """Inputs, their gradients and the parameters' gradients from outputs and their gradients."""


@dataclass(frozen=True)
class Additive(Coupling):
    """Adds ``function`` of one stream to another: target ← target + function(source).

    With ``swap`` the two streams then change places, which makes one such step after another mix both.
    """

    function: nn.Module
    source: int
    target: int
    swap: bool = False

    @property
    def modules(self) -> tuple[nn.Module, ...]:  # type: ignore[override]
        return (self.function,)

    @property
    def reads(self) -> tuple[int, ...] | None:  # type: ignore[override]
        return (self.source,)

    def forward(self, streams: Streams) -> Streams:
        _check_pair(streams)
        residual = self._evaluate(streams[self.source])
        return self._place(streams[self.source], streams[self.target] + residual, self.swap)

    def inverse(self, streams: Streams) -> Streams:
        source, target = self._pick(streams)
        return self._place(source, target - self._evaluate(source))

    def reverse(self, streams: Streams, gradients: Gradients) -> Reversal:
        # RevNet, Alg. 1: the evaluation that reconstructs the target also carries the graph of the vjp,
        # so the function runs once.
        source, target = self._pick(streams)
        source_gradient, target_gradient = self._pick(gradients)
        (leaf,) = leaves((source,))
        with torch.enable_grad():
            residual = self._evaluate(leaf)
        _, (through,), parameters = vjp((residual,), (leaf,), trainable(self.modules), (target_gradient,))
        inputs = self._place(source.detach(), target.detach() - residual.detach())
        if source_gradient is None or through is None:
            source_gradient = through if source_gradient is None else source_gradient
        else:
            source_gradient = source_gradient + through
        return Reversal(inputs, self._place(source_gradient, target_gradient), parameters)

    def _evaluate(self, x: Tensor) -> Tensor:
        return evaluate_untouched(self.function, x)

    def _pick(self, pair: tuple[T, ...]) -> tuple[T, T]:
        _check_pair(pair)
        source, target = pair[self.source], pair[self.target]
        return (target, source) if self.swap else (source, target)

    def _place(self, source: T, target: T, swap: bool = False) -> tuple[T, ...]:
        placed = (source, target) if self.source < self.target else (target, source)
        return placed[::-1] if swap else placed


def _check_pair(streams: tuple[object, ...]) -> None:
    if len(streams) != 2:
        raise ValueError(f"a reversible block takes two streams, not {len(streams)}: split the input before it")


def evaluate_untouched(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)``, refusing functions that overwrite ``x``: the stream is needed afterwards."""
    version = None if x.is_inference() else x._version
    y = function(x)
    if version is not None and x._version != version:
        raise ValueError(
            f"{type(function).__name__} changes its input in place, but a reversible block passes that input "
            "on: begin with an out-of-place operation, for example nn.ReLU() instead of nn.ReLU(inplace=True)"
        )
    if y.shape != x.shape:
        raise ValueError(
            f"{type(function).__name__} turns {tuple(x.shape)} into {tuple(y.shape)}: "
            "a residual function must keep the shape of its stream"
        )
    return y
