"""Tells whether a layer really inverts, how exactly, and whether its reversible gradients are right."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from petra.reversible.arguments import Keywords
from petra.reversible.backprop import plain_autograd, reversible_run
from petra.reversible.gradients import trainable
from petra.reversible.layer import ReversibleLayer
from petra.reversible.randomness import forked, random_state, restore_random_state
from petra.reversible.statistics import frozen_statistics, normalisations
from petra.reversible.streams import Streams, differentiable


@dataclass(frozen=True)
class Invertibility:
    """What `check_invertible` found; true when the layer inverts within the tolerance."""

    reconstruction_error: float
    """Largest difference between input and reconstructed input, relative to the largest input."""
    gradient_error: float
    """Largest difference between reversible and plain gradients, relative to the largest gradient."""
    bit_exact: bool
    """Whether the reconstruction is the input to the last bit."""
    tolerance: float

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
    layers: nn.Module | Sequence[nn.Module], *streams: Tensor, tolerance: float = 1e-4, **named: Any
) -> Invertibility:
    """Run ``streams`` forward and back through reversible layers and compare, gradients included.

    Takes one layer or a sequence of them; they and the random state are left as they were. Use float64
    inputs to tell a wrong inverse from rounding. In training mode, dropout repeats its masks on the way
    back, as it does in training. What is ``named`` is handed to all residual functions.
    """
    if not streams:
        raise ValueError("there is nothing to run: give a tensor for each stream that the layer takes")
    run: list[ReversibleLayer] = []
    for layer in layers if isinstance(layers, Sequence | nn.Sequential | nn.ModuleList) else [layers]:
        if not isinstance(layer, ReversibleLayer):
            raise ValueError(
                f"{type(layer).__name__} is not a reversible layer: derive it from petra.ReversibleLayer "
                "and give it forward and inverse, or put its residual function into petra.ReversibleResidual"
            )
        run.append(deepcopy(layer).to(streams[0].dtype))
    device = streams[0].device
    with forked(device):
        reconstructed = _there_and_back(run, streams, device, named)
        start = random_state(device)
        reversible = _gradients(run, streams, named)
        restore_random_state(device, start)
        # Under autocast, older PyTorch would go on with the casts of the weights that were made without gradients.
        torch.clear_autocast_cache()
        with plain_autograd():
            plain = _gradients(run, streams, named)
    return Invertibility(
        reconstruction_error=_difference(reconstructed, streams),
        gradient_error=_difference(reversible, plain),
        bit_exact=all(torch.equal(a, b) for a, b in zip(reconstructed, streams, strict=True)),
        tolerance=tolerance,
    )


@torch.no_grad()
def _there_and_back(
    run: list[ReversibleLayer], streams: Streams, device: torch.device, named: dict[str, Any]
) -> Streams:
    tensors, keywords = Keywords.take_apart(named)
    couplings = [coupling.named(keywords) for layer in run for coupling in layer.couplings()]
    count, streams = len(streams), (*streams, *tensors)
    states = []
    with frozen_statistics(normalisations(run)):
        for coupling in couplings:
            states.append(random_state(device))
            streams = coupling.forward(streams)
        for coupling, state in zip(reversed(couplings), reversed(states), strict=True):
            restore_random_state(device, state)
            streams = coupling.inverse(streams)
    return streams[:count]


def _gradients(run: list[ReversibleLayer], streams: Streams, named: dict[str, Any]) -> list[Tensor]:
    inputs = tuple(x.detach().clone().requires_grad_(differentiable(x)) for x in streams)
    outputs = tuple(y for y in reversible_run(run, inputs, **named) if differentiable(y))
    # A fixed direction that no symmetry of the layer hides.
    weights = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y) for y in outputs]
    loss = sum(((y * w).sum() for y, w in zip(outputs, weights, strict=True)), torch.zeros(()).to(outputs[0]))
    wanted = [*(x for x in inputs if differentiable(x)), *trainable(run)]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if differentiable(b)]
    # Tensor maxima, because Python's would lose a NaN.
    worst = torch.stack([(a - b).abs().max() for a, b in pairs]).max()
    scale = torch.stack([b.abs().max() for _, b in pairs]).max()
    return float(worst / scale.clamp(min=torch.finfo(scale.dtype).tiny))
