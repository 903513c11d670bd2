"""Reversible backprop under ordinary autograd: a run of reversible layers as one node of the graph.

The node stores the run's last output and nothing else; the backward pass reconstructs every input on
its way down (RevNet, Section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from petra.reversible.coupling import Coupling
from petra.reversible.gradients import ParameterGradients, add_gradients, trainable
from petra.reversible.layer import ReversibleLayer
from petra.reversible.randomness import forked, random_state, restore_random_state
from petra.reversible.statistics import frozen_statistics, normalisations
from petra.reversible.streams import Streams, autocast_dtype, autocasting

_PLAIN: ContextVar[bool] = ContextVar("plain_autograd", default=False)


@contextmanager
def plain_autograd() -> Iterator[None]:
    """Inside, reversible layers run under ordinary autograd and store their activations.

    The gradients are the same: use it to hold one way against the other.
    """
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def reversible_run(layers: Sequence[ReversibleLayer], streams: Streams) -> Streams:
    """Apply the layers one after the other; memory for the backward pass does not grow with their number."""
    couplings = [coupling for layer in layers for coupling in layer.couplings()]
    parameters = trainable(layers)
    recording = torch.is_grad_enabled() and any(x.requires_grad for x in (*streams, *parameters))
    if _PLAIN.get() or not recording:
        for coupling in couplings:
            streams = coupling.forward(streams)
        return streams
    return _Run.apply(couplings, len(streams), *streams, *parameters)  # type: ignore[no-any-return, no-untyped-call]


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, couplings: list[Coupling], width: int, *tensors: Tensor) -> Streams:
        ctx.couplings = couplings
        ctx.parameters = tensors[width:]
        ctx.device = tensors[0].device
        ctx.autocast = autocast_dtype(ctx.device)
        ctx.versions = [p._version for p in ctx.parameters]
        streams = tensors[:width]
        ctx.random = []
        for coupling in couplings:
            ctx.random.append(random_state(ctx.device))
            streams = coupling.forward(streams)
        # A stream that was passed through is an input; the node's outputs have to be its own.
        streams = tuple(x.view_as(x) for x in streams)
        ctx.save_for_backward(*streams)
        return streams

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if [p._version for p in ctx.parameters] != ctx.versions:
            raise RuntimeError(
                "a parameter of a reversible layer was changed between forward and backward: inputs can only be "
                "reconstructed with the weights of the forward pass, so step the optimizer after backward"
            )
        streams: Streams = ctx.saved_tensors
        totals: ParameterGradients = {}
        norms = normalisations(module for coupling in ctx.couplings for module in coupling.modules)
        with (
            forked(ctx.device),
            autocasting(ctx.device, ctx.autocast),
            frozen_statistics(norms),
        ):
            for coupling, state in zip(reversed(ctx.couplings), reversed(ctx.random), strict=True):
                restore_random_state(ctx.device, state)
                streams, gradients, found = coupling.reverse(streams, gradients)
                add_gradients(totals, found)
        return None, None, *gradients, *(totals.get(p) for p in ctx.parameters)
