"""Reversible backprop under ordinary autograd: a run of reversible layers as one node of the graph.

The node stores the run's last output and nothing else; the backward pass reconstructs every input on
its way down (RevNet, Section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from petra.reversible.arguments import Keywords
from petra.reversible.capture import Captures
from petra.reversible.coupling import Coupling
from petra.reversible.gradients import trainable, uncached_parametrizations, without_hooks
from petra.reversible.layer import ReversibleLayer
from petra.reversible.randomness import forked, random_state, restore_random_state
from petra.reversible.statistics import frozen_statistics, in_modes, modes, normalisations
from petra.reversible.streams import Streams, autocast_dtype, autocasting, differentiable
from petra.reversible.unwind import unwind
from petra.reversible.weights import check_stateless, check_unchanged, versions


class _Way(Enum):
    """How a run of reversible layers is differentiated."""

    REVERSIBLE = "reversible"
    OVERLAPPED = "overlapped"
    PLAIN = "plain"


_WAY: ContextVar[_Way] = ContextVar("way", default=_Way.REVERSIBLE)


@contextmanager
def _going(way: _Way) -> Iterator[None]:
    token = _WAY.set(way)
    try:
        yield
    finally:
        _WAY.reset(token)


def plain_autograd() -> Any:
    """A context in which reversible layers run under ordinary autograd and store their activations.

    The gradients are the same: use it to hold one way against the other.
    """
    return _going(_Way.PLAIN)


def pareprop() -> Any:
    """A context for the forward pass: in the backward pass, reconstruction overlaps with gradients (PaReprop).

    On a GPU, the inputs of one residual function are reconstructed beside the gradient of the one above it, on two CUDA
    streams; two graphs of residual functions are alive instead of one. On a CPU it changes nothing.
    """
    return _going(_Way.OVERLAPPED)


def reversible_run(
    layers: Sequence[ReversibleLayer], streams: Streams, captures: Captures | None = None, /, **named: Any
) -> Streams:
    """Apply the layers one after the other; memory for the backward pass does not grow with their number.

    What is ``named`` reaches every residual function of every layer as keyword arguments, on the way back too. Tensors
    among it get gradients if they require them. With ``captures``, on a GPU and without names, the run is recorded
    there as CUDA graphs and replayed.
    """
    tensors, keywords = Keywords.take_apart(named)
    couplings = [coupling.named(keywords) for layer in layers for coupling in layer.couplings()]
    parameters = trainable(module for coupling in couplings for module in coupling.modules)
    inputs = (*streams, *tensors)
    way = _WAY.get()
    recording = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *parameters))
    if way is _Way.PLAIN or not recording:
        outputs = inputs
        for coupling in couplings:
            outputs = coupling.forward(outputs)
    elif captures is not None and inputs[0].is_cuda and not named:
        outputs = captures.run(couplings, inputs, parameters, way is _Way.OVERLAPPED)
    else:
        job = _Job(couplings, len(inputs), tuple(parameters), way is _Way.OVERLAPPED)
        outputs = _Run.apply(job, *inputs, *parameters)  # type: ignore[no-untyped-call]
    return outputs[: len(outputs) - len(tensors)]


@dataclass(frozen=True)
class _Job:
    couplings: list[Coupling]
    width: int
    parameters: tuple[nn.Parameter, ...]
    overlap: bool

    @property
    def modules(self) -> list[nn.Module]:
        return [module for coupling in self.couplings for module in coupling.modules]


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor) -> Streams:
        ctx.job = job
        ctx.set_materialize_grads(False)  # what an unused output would get its gradient through has none
        ctx.device = tensors[0].device
        ctx.autocast = autocast_dtype(ctx.device)
        ctx.modes = modes(job.modules)
        streams = tensors[: job.width]
        ctx.random = []
        with autocasting(ctx.device, ctx.autocast), uncached_parametrizations():
            for coupling in job.couplings:
                ctx.random.append(random_state(ctx.device))
                streams = coupling.forward(streams)
        ctx.versions = versions(job.modules)
        # A stream that was passed through is an input; the node's outputs have to be its own.
        streams = tuple(x.view_as(x) for x in streams)
        ctx.save_for_backward(*streams)
        return streams

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        job: _Job = ctx.job
        check_unchanged(job.modules, ctx.versions)
        wanted = ctx.needs_input_grad[1 : 1 + job.width]
        saved = ctx.saved_tensors  # reading them twice would unpack them twice
        more = len(saved) - job.width  # where a stem has made two streams of one, or a layer one of two
        companions = 2 + min(more, 0)
        streams = tuple(
            x.detach().requires_grad_(i >= companions and wanted[i - more])  # a companion's gradient costs extra
            for i, x in enumerate(saved)
        )
        with (
            forked(ctx.device),
            autocasting(ctx.device, ctx.autocast),
            in_modes(ctx.modes),
            frozen_statistics(normalisations(job.modules)),
            without_hooks(job.parameters),
            uncached_parametrizations(),
        ):
            _, into_inputs, into_parameters = unwind(
                job.couplings,
                streams,
                tuple(g if differentiable(x) else None for g, x in zip(gradients, streams, strict=True)),
                lambda i: restore_random_state(ctx.device, ctx.random[i]),
                job.overlap,
            )
        check_stateless(job.modules, ctx.versions)
        return None, *into_inputs, *(into_parameters.get(p) for p in job.parameters)
