"""Segments of reversible layers as CUDA graphs: one launch forward and one backward, whatever the depth.

Where kernels are small, a GPU waits for the host that launches them. A segment keeps nothing but its outputs between
forward and backward, so both directions can be captured once and launched on copies of their inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from petra.reversible.coupling import Coupling
from petra.reversible.module_state import frozen_statistics, held_tensors, modes, normalisations
from petra.reversible.randomness import forked, random_state
from petra.reversible.reverse_pass import reverse_pass
from petra.reversible.streams import Gradients, Streams, autocast_dtype, autocasting, differentiable
from petra.reversible.weight_versions import check_unchanged, versions

Key = tuple[Any, ...]
_WARM_UPS = 3


@dataclass
class SegmentGraphs:
    """The captured segments of one network, by everything that determines their kernels."""

    graphs: dict[Key, SegmentGraph] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> SegmentGraphs:
        return SegmentGraphs()  # a graph refers to the memory of its own network

    def __reduce__(self) -> tuple[type[SegmentGraphs], tuple[()]]:
        return SegmentGraphs, ()

    def apply(
        self, couplings: Sequence[Coupling], streams: Streams, parameters: Sequence[nn.Parameter], overlap: bool
    ) -> Streams:
        """Apply the couplings to the streams, capturing a graph if there is none for them yet."""
        modules = [module for coupling in couplings for module in coupling.modules]
        held = held_tensors(modules)
        key = (
            tuple((type(coupling), *map(id, coupling.modules)) for coupling in couplings),
            tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in held),
            tuple((x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in streams),
            autocast_dtype(streams[0].device),
            tuple(modes(modules).values()),
            overlap,
        )
        if key not in self.graphs:
            self.graphs[key] = SegmentGraph(couplings, streams, parameters, overlap)
        return _CapturedSegment.apply(self.graphs[key], *streams, *parameters)  # type: ignore[no-any-return, no-untyped-call]


class SegmentGraph:
    """The forward and backward pass of a segment, captured for tensors of given shapes, dtypes and devices."""

    def __init__(
        self, couplings: Sequence[Coupling], streams: Streams, parameters: Sequence[nn.Parameter], overlap: bool
    ) -> None:
        self.couplings, self.parameters, self.overlap = list(couplings), list(parameters), overlap
        self.wanted = [x.requires_grad for x in streams]
        self.device = streams[0].device
        self.autocast = autocast_dtype(self.device)
        self.modules = [module for coupling in couplings for module in coupling.modules]
        self.norms = normalisations(self.modules)
        # Referred to here so that their memory, which the graphs read, is never given to other tensors.
        self.held = held_tensors(self.modules)
        self.inputs = tuple(x.detach().clone() for x in streams)
        with _aliased(self.couplings, parameters) as self.aliases:
            self._warm_up()
            self._capture()

    def _capture(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward_graph, pool=pool, capture_error_mode="thread_local"):
            self.outputs = tuple(x.clone() for x in self._forward(self.inputs))
        self.saved_outputs = tuple(x.clone() for x in self.outputs)
        self.output_gradients: Gradients = tuple(
            torch.zeros_like(x) if differentiable(x) else None for x in self.outputs
        )
        with torch.cuda.graph(self.backward_graph, pool=pool, capture_error_mode="thread_local"):
            self.gradients = self._backward(self.saved_outputs, self.output_gradients)

    def forward(self, streams: Streams) -> Streams:
        """Launch the forward graph and return copies of its outputs."""
        for buffer, x in zip(self.inputs, streams, strict=True):
            buffer.copy_(x)
        self.forward_graph.replay()
        return tuple(x.clone() for x in self.outputs)

    def backward(self, streams: Streams, gradients: Gradients) -> list[Tensor | None]:
        """Launch the backward graph and return copies of the gradients of inputs and parameters."""
        for buffer, x in zip(self.saved_outputs, streams, strict=True):
            buffer.copy_(x)
        for into, gradient in zip(self.output_gradients, gradients, strict=True):
            if into is not None:
                into.zero_() if gradient is None else into.copy_(gradient)
        self.backward_graph.replay()
        return [None if gradient is None else gradient.clone() for gradient in self.gradients]

    def _forward(self, streams: Streams) -> Streams:
        with torch.no_grad(), autocasting(self.device, self.autocast):
            for coupling in self.couplings:
                streams = coupling.forward(streams)
        return streams

    def _backward(self, streams: Streams, gradients: Gradients) -> list[Tensor | None]:
        more = len(streams) - len(self.wanted)  # not 0 if a stem makes two streams of one, or a layer one of two
        companions = 2 + min(more, 0)
        for x, want in zip(streams[companions:], self.wanted[companions - more :], strict=True):
            x.requires_grad_(want)
        with autocasting(self.device, self.autocast), frozen_statistics(self.norms):
            found = reverse_pass(self.couplings, streams, gradients, lambda i: None, self.overlap)
        for x in streams:
            x.requires_grad_(False)
        into_inputs = [g if want else None for g, want in zip(found.gradients, self.wanted, strict=True)]
        return [*into_inputs, *(found.parameters.get(p) for p in self.aliases)]

    def _warm_up(self) -> None:
        """Let libraries choose their kernels and compilers finish, and check that no random numbers are drawn."""
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with forked(self.device), torch.cuda.stream(side):
            buffers = [(buffer, buffer.clone()) for norm in self.norms for buffer in norm.buffers()]
            for turn in range(_WARM_UPS):
                if turn == 1:  # compilers may draw random numbers in the first turn
                    before = random_state(self.device)
                outputs = self._forward(self.inputs)
                self._backward(
                    tuple(x.clone() for x in outputs),
                    tuple(torch.zeros_like(x) if differentiable(x) else None for x in outputs),
                )
            for buffer, value in buffers:
                buffer.copy_(value)
            if any(not a.equal(b) for a, b in zip(before, random_state(self.device), strict=True)):
                raise ValueError(
                    "a residual function draws random numbers (dropout, stochastic depth), but a captured graph cannot "
                    "repeat them in the backward pass: set their rates to 0, or do not call use_cuda_graphs()"
                )
        torch.cuda.current_stream(self.device).wait_stream(side)


@contextmanager
def _aliased(couplings: Sequence[Coupling], parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Replace the parameters of the functions by new ones in the same memory, and yield these.

    Autograd ties a parameter to the CUDA stream on which a graph that still exists first used it, and would wait for
    that CUDA stream during capture on another one.
    """
    others = {p: nn.Parameter(p.detach()) for p in parameters}
    holders = {m for coupling in couplings for module in coupling.modules for m in module.modules()}
    own = [(m, name, p) for m in holders for name, p in m._parameters.items() if p is not None and p in others]
    for module, name, parameter in own:
        module._parameters[name] = others[parameter]
    try:
        yield list(others.values())
    finally:
        for module, name, parameter in own:
            module._parameters[name] = parameter


class _CapturedSegment(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: SegmentGraph, *tensors: Tensor) -> Streams:
        ctx.graph = graph
        streams = graph.forward(tensors[: len(graph.inputs)])
        ctx.versions = versions(graph.modules)
        ctx.save_for_backward(*streams)
        return streams

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        graph: SegmentGraph = ctx.graph
        check_unchanged(graph.modules, ctx.versions)
        return None, *graph.backward(ctx.saved_tensors, gradients)
