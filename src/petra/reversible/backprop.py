"""Reversible backpropagation under ordinary autograd: a segment of reversible layers as one node of the graph.

The node stores the outputs of the segment only; the backward pass reconstructs all inputs from them, from the last
layer to the first (RevNet, Section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from petra.reversible.coupling import Coupling
from petra.reversible.gradients import trainable, uncached_parametrizations, without_hooks
from petra.reversible.keyword_arguments import Keywords
from petra.reversible.layer import ReversibleLayer
from petra.reversible.module_state import frozen_statistics, in_modes, modes, normalisations
from petra.reversible.randomness import forked, note_draws, random_state, restore_random_state
from petra.reversible.reverse_pass import reverse_pass
from petra.reversible.segment_graph import SegmentGraphs
from petra.reversible.streams import Streams, autocast_dtype, autocasting, differentiable
from petra.reversible.weight_versions import check_stateless, check_unchanged, versions


class _BackwardMode(Enum):
    """How a segment of reversible layers is differentiated."""

    REVERSIBLE = "reversible"
    OVERLAPPED = "overlapped"
    PLAIN = "plain"


_BACKWARD_MODE: ContextVar[_BackwardMode] = ContextVar("backward_mode", default=_BackwardMode.REVERSIBLE)


@contextmanager
def _use_backward_mode(mode: _BackwardMode) -> Iterator[None]:
    token = _BACKWARD_MODE.set(mode)
    try:
        yield
    finally:
        _BACKWARD_MODE.reset(token)


def plain_autograd() -> AbstractContextManager[None]:
    """Run reversible layers under ordinary autograd, which stores their activations.

    The gradients are the same. Use it to compare the two.

    Returns:
        A context manager for the forward pass.
    """
    return _use_backward_mode(_BackwardMode.PLAIN)


def pareprop() -> AbstractContextManager[None]:
    """Overlap reconstruction with gradient computation in the backward pass (PaReprop).

    On a GPU, the inputs of one residual function are reconstructed while the gradient of the next one is computed, on
    two CUDA streams. Two graphs of residual functions exist at a time instead of one. On a CPU it has no effect.

    Returns:
        A context manager for the forward pass.
    """
    return _use_backward_mode(_BackwardMode.OVERLAPPED)


def reversible_segment(
    layers: Sequence[ReversibleLayer], streams: Streams, graphs: SegmentGraphs | None = None, /, **kwargs: Any
) -> Streams:
    """Apply reversible layers in sequence, with memory for the backward pass that does not grow with their number.

    Args:
        layers: The layers of the segment.
        streams: The inputs of the first layer.
        graphs: Where to store CUDA graphs. If given, the segment is captured on the first call and launched as CUDA
            graphs, on a GPU and without keyword arguments.
        **kwargs: Keyword arguments for every residual function of every layer, in the forward and the backward pass.
            Tensors among them get gradients if they require them.

    Returns:
        The outputs of the last layer.
    """
    if torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
        # torch.compile must not trace the segment: its forward and backward would be compiled differently.
        uncompiled = torch.compiler.disable(reversible_segment)  # type: ignore[no-untyped-call]
        return uncompiled(layers, streams, graphs, **kwargs)  # type: ignore[no-any-return]
    tensors, keywords = Keywords.flatten(kwargs)
    couplings = [coupling.with_keywords(keywords) for layer in layers for coupling in layer.couplings()]
    parameters = trainable(module for coupling in couplings for module in coupling.modules)
    inputs = (*streams, *tensors)
    mode = _BACKWARD_MODE.get()
    needs_graph = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *parameters))
    # torch.jit.trace records operations, and cannot record a node with a backward of its own.
    if mode is _BackwardMode.PLAIN or not needs_graph or _tracing():
        outputs = inputs
        for coupling in couplings:
            outputs = coupling.forward(outputs)
    elif graphs is not None and inputs[0].is_cuda and not kwargs:
        outputs = graphs.apply(couplings, inputs, parameters, mode is _BackwardMode.OVERLAPPED)
    else:
        segment = _Segment(couplings, len(inputs), tuple(parameters), mode is _BackwardMode.OVERLAPPED)
        outputs = _SegmentFunction.apply(segment, *inputs, *parameters)  # type: ignore[no-untyped-call]
    return outputs[: len(outputs) - len(tensors)]


def _tracing() -> bool:
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


@dataclass(frozen=True)
class _Segment:
    couplings: list[Coupling]
    inputs: int
    """The number of input streams, keyword tensors included."""
    parameters: tuple[nn.Parameter, ...]
    overlap: bool

    @property
    def modules(self) -> list[nn.Module]:
        return [module for coupling in self.couplings for module in coupling.modules]


class _SegmentFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, segment: _Segment, *tensors: Tensor) -> Streams:
        ctx.segment = segment
        ctx.set_materialize_grads(False)  # so that parameters behind an unused output get None instead of zeros
        ctx.device = tensors[0].device
        ctx.autocast = autocast_dtype(ctx.device)
        ctx.modes = modes(segment.modules)
        streams = tensors[: segment.inputs]
        ctx.random = []
        with autocasting(ctx.device, ctx.autocast), uncached_parametrizations():
            for coupling in segment.couplings:
                ctx.random.append(random_state(ctx.device))
                streams = coupling.forward(streams)
        note_draws(segment.modules, ctx.device, ctx.random[0])
        ctx.versions = versions(segment.modules)
        # A stream that passes unchanged is an input, and a node must not return its inputs.
        streams = tuple(x.view_as(x) for x in streams)
        ctx.save_for_backward(*streams)
        return streams

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        segment: _Segment = ctx.segment
        check_unchanged(segment.modules, ctx.versions)
        wanted = ctx.needs_input_grad[1 : 1 + segment.inputs]
        saved = ctx.saved_tensors  # read once, because each access calls the unpack hooks
        more = len(saved) - segment.inputs  # not 0 if a stem makes two streams of one, or a layer one of two
        companions = 2 + min(more, 0)
        streams = tuple(
            x.detach().requires_grad_(i >= companions and wanted[i - more])  # only as needed: it costs extra
            for i, x in enumerate(saved)
        )
        with (
            forked(ctx.device),
            autocasting(ctx.device, ctx.autocast),
            in_modes(ctx.modes),
            frozen_statistics(normalisations(segment.modules)),
            without_hooks(segment.parameters),
            uncached_parametrizations(),
        ):
            _, into_inputs, into_parameters = reverse_pass(
                segment.couplings,
                streams,
                tuple(g if differentiable(x) else None for g, x in zip(gradients, streams, strict=True)),
                lambda i: restore_random_state(ctx.device, ctx.random[i]),
                segment.overlap,
            )
        check_stateless(segment.modules, ctx.versions)
        return None, *into_inputs, *(into_parameters.get(p) for p in segment.parameters)
