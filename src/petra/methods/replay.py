"""Features Replay and DDG: the forward pass is locked, then all stages go backward at once, on older micro-batches."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from petra.methods.backprop import Backprop
from petra.methods.chain import Chain
from petra.methods.delayed import Checkpointed
from petra.methods.method import BackwardMessage, Kept
from petra.reversible.gradients import Reversal
from petra.reversible.streams import Streams
from petra.schedule import LockedForward, Order


class FeaturesReplay(Checkpointed):
    """Keeps the last J-s inputs and plays each again through the current weights (Huo et al., 2018, Alg. 1).

    The gradient from above is that of the iteration before (Eq. 6), taken back at the replayed features (Eq. 7).
    """

    name = "features-replay"
    summary = "all stages go backward at once, on older inputs and with current weights (Features Replay)"
    keeps = "stage input, J-s of them"
    pipelined = False

    def order(self, stages: int, accumulate: int) -> Order:
        return LockedForward(stages, accumulate)


class DDG(Backprop):
    """Keeps the graphs of J-s forwards: gradients are late, but exact for the weights of the forward.

    Decoupled parallel backpropagation (Huo et al., "Decoupled Parallel Backpropagation with Convergence
    Guarantee", 2018). A graph points into the weights that it was made with, so an update leaves these as they are.
    """

    name = "ddg"
    summary = "all stages go backward at once, through graphs of older micro-batches (DDG)"
    keeps = "graph + weights, J-s of them"
    backward_weights = "of its forward"
    stashes_weights = True
    keeps_graphs = True
    stale = True

    def order(self, stages: int, accumulate: int) -> Order:
        return LockedForward(stages, accumulate)

    def forward(self, chain: Chain, microbatch: int, inputs: Streams, final: bool) -> tuple[Streams, Kept]:
        with chain.aliased() as aliases:
            outputs, kept = super().forward(chain, microbatch, inputs, final)
        assert kept.tape is not None
        kept.tape = replace(kept.tape, aliases=aliases)
        return outputs, kept

    def backward(self, chain: Chain, microbatch: int, kept: Kept, message: BackwardMessage) -> Reversal:
        if kept.tape is None:  # from a checkpoint, which holds no graph: the same evaluation makes the same one
            with chain.using(kept.weights):
                tape = chain.record(chain.whole, kept.inputs[0], microbatch, counts=False)
                return tape.gradients(message.gradients)
        assert kept.tape.aliases is not None
        with chain.aliased(kept.tape.aliases):  # for a run of reversible layers inside a layer, evaluated again
            found = super().backward(chain, microbatch, kept, message)
        own = {alias: p for p, alias in kept.tape.aliases.items() if p.requires_grad}  # not if it was frozen since
        gradients = {own[alias]: _hooked(own[alias], g) for alias, g in found.parameters.items() if alias in own}
        return found._replace(parameters=gradients)


@torch.no_grad()
def _hooked(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """What the parameter's own hooks make of a gradient that was found for another in its place."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient
