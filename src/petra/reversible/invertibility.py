"""Checks whether reversible layers invert, how exactly, and whether their reversible gradients are right."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from petra.reversible.backprop import plain_autograd, reversible_segment
from petra.reversible.gradients import trainable
from petra.reversible.keyword_arguments import Keywords
from petra.reversible.layer import ReversibleLayer
from petra.reversible.module_state import frozen_statistics, normalisations
from petra.reversible.randomness import forked, random_state, restore_random_state
from petra.reversible.streams import Streams, differentiable


@dataclass(frozen=True)
class Invertibility:
    """The result of `check_invertible`; true if the layers invert within the tolerance."""

    reconstruction_error: float
    """The largest difference between an input and its reconstruction, relative to the largest input."""
    gradient_error: float
    """The largest difference between reversible and plain gradients, relative to the largest gradient."""
    bit_exact: bool
    """True if the reconstruction equals the input bit for bit."""
    tolerance: float
    """The limit for both errors."""

    def __bool__(self) -> bool:
        # Written so that NaN does not pass.
        return self.reconstruction_error <= self.tolerance and self.gradient_error <= self.tolerance

    def __str__(self) -> str:
        verdict = "inverts" if self else "does NOT invert"
        exact = "bit for bit" if self.bit_exact else f"to {self.reconstruction_error:.1e}"
        return (
            f"{verdict}: inputs come back {exact}, gradients agree to {self.gradient_error:.1e} "
            f"(tolerance {self.tolerance:.0e})"
        )


def check_invertible(
    layers: nn.Module | Sequence[nn.Module], *streams: Tensor, tolerance: float = 1e-4, **kwargs: Any
) -> Invertibility:
    """Apply reversible layers forward and back, and compare inputs and gradients.

    The layers are copied, and the random state is restored. In training mode, dropout uses the same masks forward and
    back, as it does in training.

    Args:
        layers: One reversible layer, or a sequence of them.
        *streams: The inputs. Use float64 to tell a wrong inverse from rounding.
        tolerance: The largest relative error of inputs and gradients to accept.
        **kwargs: Keyword arguments for all residual functions.

    Returns:
        The errors; true if they are within the tolerance.

    Raises:
        ValueError: If no streams are given, or a layer is not a `ReversibleLayer`.
    """
    if not streams:
        raise ValueError("no streams are given: pass one tensor for each stream that the layer takes")
    segment: list[ReversibleLayer] = []
    for layer in layers if isinstance(layers, Sequence | nn.Sequential | nn.ModuleList) else [layers]:
        if not isinstance(layer, ReversibleLayer):
            raise ValueError(
                f"{type(layer).__name__} is not a reversible layer: derive it from petra.ReversibleLayer "
                "and implement forward and inverse, or put its residual function into petra.ReversibleResidual"
            )
        segment.append(deepcopy(layer).to(streams[0].dtype))
    device = streams[0].device
    with forked(device):
        reconstructed = _there_and_back(segment, streams, device, kwargs)
        start = random_state(device)
        reversible = _gradients(segment, streams, kwargs)
        restore_random_state(device, start)
        # Under autocast, older PyTorch versions would reuse the cast weights of the evaluation without gradients.
        torch.clear_autocast_cache()
        with plain_autograd():
            plain = _gradients(segment, streams, kwargs)
    return Invertibility(
        reconstruction_error=_difference(reconstructed, streams),
        gradient_error=_difference(reversible, plain),
        bit_exact=all(torch.equal(a, b) for a, b in zip(reconstructed, streams, strict=True)),
        tolerance=tolerance,
    )


@torch.no_grad()
def _there_and_back(
    segment: list[ReversibleLayer], streams: Streams, device: torch.device, kwargs: dict[str, Any]
) -> Streams:
    tensors, keywords = Keywords.flatten(kwargs)
    couplings = [coupling.with_keywords(keywords) for layer in segment for coupling in layer.couplings()]
    count, streams = len(streams), (*streams, *tensors)
    states = []
    with frozen_statistics(normalisations(segment)):
        for coupling in couplings:
            states.append(random_state(device))
            streams = coupling.forward(streams)
        for coupling, state in zip(reversed(couplings), reversed(states), strict=True):
            restore_random_state(device, state)
            streams = coupling.inverse(streams)
    return streams[:count]


def _gradients(segment: list[ReversibleLayer], streams: Streams, kwargs: dict[str, Any]) -> list[Tensor]:
    inputs = tuple(x.detach().clone().requires_grad_(differentiable(x)) for x in streams)
    outputs = tuple(y for y in reversible_segment(segment, inputs, **kwargs) if differentiable(y))
    # A fixed direction that no symmetry of the layer hides.
    weights = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y) for y in outputs]
    loss = sum(((y * w).sum() for y, w in zip(outputs, weights, strict=True)), torch.zeros(()).to(outputs[0]))
    wanted = [*(x for x in inputs if differentiable(x)), *trainable(segment)]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if differentiable(b)]
    # Maxima of tensors, because Python's `max` could drop a NaN.
    worst = torch.stack([(a - b).abs().max() for a, b in pairs]).max()
    scale = torch.stack([b.abs().max() for _, b in pairs]).max()
    return float(worst / scale.clamp(min=torch.finfo(scale.dtype).tiny))
