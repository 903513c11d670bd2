"""Reversible backpropagation under ordinary autograd.

Every layer of a segment is one node of the graph. Only the last one stores its outputs. In the backward pass, each node
reconstructs its inputs, and passes them to the node below as the outputs of that layer (RevNet, Section 3.2). The
gradients of a layer are complete, and their hooks have run, before the layer below begins. With PaReprop, and with CUDA
graphs, a whole segment is one node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from petra.reversible.weight_versions import Versions, check_stateless, check_unchanged, versions


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
    parts = [[coupling.with_keywords(keywords) for coupling in layer.couplings()] for layer in layers]
    mode = _BACKWARD_MODE.get()
    couplings = [coupling for part in parts for coupling in part]
    if mode is _BackwardMode.OVERLAPPED:
        parts = [couplings]  # only couplings of one node can overlap
    trained = [trainable(module for coupling in part for module in coupling.modules) for part in parts]
    parameters = list(dict.fromkeys(parameter for own in trained for parameter in own))
    inputs = (*streams, *tensors)
    needs_graph = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *parameters))
    # torch.jit.trace records operations, and cannot record a node with a backward of its own.
    if mode is _BackwardMode.PLAIN or not needs_graph or _tracing():
        outputs = inputs
        for coupling in couplings:
            outputs = coupling.forward(outputs)
    elif graphs is not None and inputs[0].is_cuda and not kwargs:
        outputs = graphs.apply(couplings, inputs, parameters, mode is _BackwardMode.OVERLAPPED)
    else:
        segment = _Segment(parts, inputs[0].device, mode is _BackwardMode.OVERLAPPED)
        outputs = inputs
        with uncached_parametrizations():
            for index, own in enumerate(trained):
                node = _Node(segment, index, len(outputs), tuple(own))
                outputs = _NodeFunction.apply(node, *outputs, *own)  # type: ignore[no-untyped-call]
        segment.finish_forward()
    return outputs[: len(outputs) - len(tensors)]


def _tracing() -> bool:
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


class _Segment:
    """The state that the nodes of a segment share.

    Args:
        parts: The couplings of each node.
        device: The device of the streams.
        overlap: Whether reconstruction and gradients overlap.
    """

    def __init__(self, parts: Sequence[Sequence[Coupling]], device: torch.device, overlap: bool) -> None:
        self.parts, self.device, self.overlap = parts, device, overlap
        self.autocast = autocast_dtype(device)
        self.modules = [[module for coupling in part for module in coupling.modules] for part in parts]
        self.modes = [modes(modules) for modules in self.modules]
        self.norms = [normalisations(modules) for modules in self.modules]
        self.versions: list[Versions] = []
        """The versions of the weights of each node after the forward pass."""
        self.random: list[list[list[Tensor]]] = []
        """For each node, the random state before each coupling; empty if the forward pass drew no random numbers."""
        self._handed_over: dict[int, Streams] = {}  # by the number of the backward pass

    def finish_forward(self) -> None:
        """Record weights and the use of random numbers, after the forward pass."""
        self.versions = [versions(modules) for modules in self.modules]
        before = next((states[0] for states in self.random if states), [])
        draws = note_draws([module for modules in self.modules for module in modules], self.device, before)
        if not draws:
            self.random.clear()

    def check_unchanged(self) -> None:
        """Raise `RuntimeError` if the weights are not those of the forward pass."""
        for modules, then in zip(self.modules, self.versions, strict=True):
            check_unchanged(modules, then)

    def hand_over(self, streams: Streams) -> None:
        """Keep reconstructed inputs for the node below."""
        self._handed_over[_backward_pass()] = streams

    def take(self) -> Streams:
        """Return the outputs of a node, which the node above has reconstructed in the same backward pass."""
        streams = self._handed_over.pop(_backward_pass(), None)
        if streams is None:
            raise RuntimeError(
                "a backward pass began inside a segment of reversible layers, but inputs are reconstructed from the "
                "outputs of the segment: begin with its outputs, or use petra.plain_autograd() around the forward pass"
            )
        return streams


def _backward_pass() -> int:
    """Return the number of the backward pass that runs; reentrant and concurrent ones have different numbers."""
    number: int = torch._C._current_graph_task_id()
    return number


@dataclass(frozen=True)
class _Node:
    segment: _Segment
    index: int
    """The index of the node in the segment."""
    inputs: int
    """The number of input streams, keyword tensors included."""
    parameters: tuple[nn.Parameter, ...]

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == len(self.segment.parts) - 1


class _NodeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, node: _Node, *tensors: Tensor) -> Streams:
        ctx.node = node
        ctx.set_materialize_grads(False)  # so that parameters behind an unused output get None instead of zeros
        segment, inputs = node.segment, tensors[: node.inputs]
        streams: Streams = inputs
        random = []
        with autocasting(segment.device, segment.autocast):
            for coupling in segment.parts[node.index]:
                random.append(random_state(segment.device))
                streams = coupling.forward(streams)
        segment.random.append(random)
        # Companions without a gradient stay so: their gradients would cost time in the layers above.
        without = {id(x) for x, need in zip(inputs, ctx.needs_input_grad[1:], strict=False) if not need}
        constant = [id(x) in without for x in streams]
        # A stream that passes unchanged is an input, and a node must not return its inputs.
        streams = tuple(x.view_as(x) for x in streams)
        ctx.mark_non_differentiable(*(x for x, same in zip(streams, constant, strict=True) if same))
        if node.last:
            ctx.save_for_backward(*streams)
        return streams

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        node: _Node = ctx.node
        segment, index = node.segment, node.index
        if node.last:
            segment.check_unchanged()
        # Read once, because each access calls the unpack hooks.
        outputs: Streams = ctx.saved_tensors if node.last else segment.take()
        wanted = ctx.needs_input_grad[1 : 1 + node.inputs]
        more = len(outputs) - node.inputs  # not 0 if a layer splits one stream into two, or joins two
        companions = 2 + min(more, 0)
        streams = tuple(
            x.detach().requires_grad_(i >= companions and wanted[i - more])  # gradients of companions cost time
            for i, x in enumerate(outputs)
        )
        random = segment.random[index] if segment.random else []
        with (
            forked(segment.device) if random else nullcontext(),
            autocasting(segment.device, segment.autocast),
            in_modes(segment.modes[index]),
            frozen_statistics(segment.norms[index]),
            without_hooks(node.parameters),
            uncached_parametrizations(),
        ):
            inputs, into_inputs, into_parameters = reverse_pass(
                segment.parts[index],
                streams,
                tuple(g if differentiable(x) else None for g, x in zip(gradients, streams, strict=True)),
                lambda i: restore_random_state(segment.device, random[i] if random else []),
                segment.overlap,
            )
        check_stateless(segment.modules[index], segment.versions[index])
        if not node.first and any(wanted):
            segment.hand_over(inputs)
        return None, *into_inputs, *(into_parameters.get(p) for p in node.parameters)
