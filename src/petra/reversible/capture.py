"""Runs of reversible layers as CUDA graphs: two launches, one up and one down, whatever the depth.

Where kernels are small, a GPU waits for the host that launches them. A run keeps nothing between forward and
backward but its outputs, so both directions can be recorded once and replayed on copies of what they read.
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
from petra.reversible.modules import held_tensors
from petra.reversible.randomness import forked, random_state
from petra.reversible.statistics import frozen_statistics, modes, normalisations
from petra.reversible.streams import Gradients, Streams, autocast_dtype, autocasting, differentiable
from petra.reversible.unwind import unwind
from petra.reversible.weights import check_unchanged, versions

Key = tuple[Any, ...]
_WARM_UPS = 3


@dataclass
class Captures:
    """The recorded runs of one network, by what decides their kernels."""

    programs: dict[Key, Program] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Captures:
        return Captures()  # a graph knows the memory of its own network only

    def __reduce__(self) -> tuple[type[Captures], tuple[()]]:
        return Captures, ()

    def run(
        self, couplings: Sequence[Coupling], streams: Streams, parameters: Sequence[nn.Parameter], overlap: bool
    ) -> Streams:
        """Like a reversible run, with every launch recorded."""
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
        if key not in self.programs:
            self.programs[key] = Program(couplings, streams, parameters, overlap)
        return _Replay.apply(self.programs[key], *streams, *parameters)  # type: ignore[no-any-return, no-untyped-call]


class Program:
    """Forward and backward of a run, recorded for tensors of one kind."""

    def __init__(
        self, couplings: Sequence[Coupling], streams: Streams, parameters: Sequence[nn.Parameter], overlap: bool
    ) -> None:
        self.couplings, self.parameters, self.overlap = list(couplings), list(parameters), overlap
        self.wanted = [x.requires_grad for x in streams]
        self.device = streams[0].device
        self.autocast = autocast_dtype(self.device)
        self.modules = [module for coupling in couplings for module in coupling.modules]
        self.norms = normalisations(self.modules)
        # Kept, so that nothing else can come to lie where the graphs read.
        self.held = held_tensors(self.modules)
        self.inputs = tuple(x.detach().clone() for x in streams)
        with _aliased(self.couplings, parameters) as self.aliases:
            self._warm_up()
            self._record()

    def _record(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        self.up, self.down = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.up, pool=pool, capture_error_mode="thread_local"):
            self.outputs = tuple(x.clone() for x in self._forward(self.inputs))
        self.reached = tuple(x.clone() for x in self.outputs)
        self.gradients: Gradients = tuple(torch.zeros_like(x) if differentiable(x) else None for x in self.outputs)
        with torch.cuda.graph(self.down, pool=pool, capture_error_mode="thread_local"):
            self.found = self._backward(self.reached, self.gradients)

    def forward(self, streams: Streams) -> Streams:
        """Outputs in memory of their own."""
        for own, x in zip(self.inputs, streams, strict=True):
            own.copy_(x)
        self.up.replay()
        return tuple(x.clone() for x in self.outputs)

    def backward(self, streams: Streams, gradients: Gradients) -> list[Tensor | None]:
        """Gradients of inputs and parameters, in memory of their own."""
        for own, x in zip(self.reached, streams, strict=True):
            own.copy_(x)
        for into, gradient in zip(self.gradients, gradients, strict=True):
            if into is not None:
                into.zero_() if gradient is None else into.copy_(gradient)
        self.down.replay()
        return [None if gradient is None else gradient.clone() for gradient in self.found]

    def _forward(self, streams: Streams) -> Streams:
        with torch.no_grad(), autocasting(self.device, self.autocast):
            for coupling in self.couplings:
                streams = coupling.forward(streams)
        return streams

    def _backward(self, streams: Streams, gradients: Gradients) -> list[Tensor | None]:
        more = len(streams) - len(self.wanted)  # where a stem has made two streams of one, or a layer one of two
        companions = 2 + min(more, 0)
        for x, want in zip(streams[companions:], self.wanted[companions - more :], strict=True):
            x.requires_grad_(want)
        with autocasting(self.device, self.autocast), frozen_statistics(self.norms):
            found = unwind(self.couplings, streams, gradients, lambda i: None, self.overlap)
        for x in streams:
            x.requires_grad_(False)
        into_inputs = [g if want else None for g, want in zip(found.gradients, self.wanted, strict=True)]
        return [*into_inputs, *(found.parameters.get(p) for p in self.aliases)]

    def _warm_up(self) -> None:
        """Let libraries choose their kernels and compilers work, and see that nothing is drawn at random."""
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with forked(self.device), torch.cuda.stream(side):
            buffers = [(buffer, buffer.clone()) for norm in self.norms for buffer in norm.buffers()]
            for turn in range(_WARM_UPS):
                if turn == 1:  # compilers may have drawn some in the first
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
                    "a residual function draws random numbers (dropout, stochastic depth), and a recorded graph cannot "
                    "repeat them backward: set their rates to 0, or do without capture"
                )
        torch.cuda.current_stream(self.device).wait_stream(side)


@contextmanager
def _aliased(couplings: Sequence[Coupling], parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Inside, the functions have other parameters in the same memory, which these are.

    Autograd ties a parameter to the CUDA stream on which a graph that is still alive has first used it, and would wait
    for that stream while another is being recorded.
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


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: Program, *tensors: Tensor) -> Streams:
        ctx.program = program
        streams = program.forward(tensors[: len(program.inputs)])
        ctx.versions = versions(program.modules)
        ctx.save_for_backward(*streams)
        return streams

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        program: Program = ctx.program
        check_unchanged(program.modules, ctx.versions)
        return None, *program.backward(ctx.saved_tensors, gradients)
