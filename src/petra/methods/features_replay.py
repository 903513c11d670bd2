"""Features Replay and DDG: the forward pass is locked, then all stages run the backward of an older micro-batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from petra.methods.delayed import Checkpointed
from petra.methods.method import BackwardMessage, SavedState
from petra.methods.stage_layers import StageLayers
from petra.methods.synchronous import Backprop
from petra.reversible.gradients import Reversal
from petra.reversible.streams import Streams
from petra.schedule import LockedForwardSchedule, PipelineSchedule


class FeaturesReplay(Checkpointed):
    """Saves the last J-s inputs and replays each through the current weights (Huo et al., 2018, Alg. 1).

    The gradient from above is that of the previous iteration (Eq. 6), propagated at the replayed features (Eq. 7).
    """

    name = "features-replay"
    summary = "all stages go backward at once, on older inputs and with current weights (Features Replay)"
    saves = "stage input, J-s of them"
    pipelined = False

    def schedule(self, stages: int, accumulate: int) -> PipelineSchedule:
        return LockedForwardSchedule(stages, accumulate)


class DDG(Backprop):
    """Saves the graphs of J-s forwards: gradients are late, but exact for the weights of the forward.

    Decoupled parallel backpropagation (Huo et al., "Decoupled Parallel Backpropagation with Convergence
    Guarantee", 2018). A graph refers to the weights it was recorded with, so an update must not overwrite them.
    """

    name = "ddg"
    summary = "all stages go backward at once, through graphs of older micro-batches (DDG)"
    saves = "graph + weights, J-s of them"
    backward_weights = "of its forward"
    stashes_weights = True
    saves_graphs = True
    stale = True

    def schedule(self, stages: int, accumulate: int) -> PipelineSchedule:
        return LockedForwardSchedule(stages, accumulate)

    def forward(self, layers: StageLayers, microbatch: int, inputs: Streams, final: bool) -> tuple[Streams, SavedState]:
        with layers.aliased() as aliases:
            outputs, saved = super().forward(layers, microbatch, inputs, final)
        assert saved.tape is not None
        saved.tape = replace(saved.tape, aliases=aliases)
        return outputs, saved

    def backward(self, layers: StageLayers, microbatch: int, saved: SavedState, message: BackwardMessage) -> Reversal:
        if saved.tape is None:
            return super().backward(layers, microbatch, saved, message)
        assert saved.tape.aliases is not None
        with layers.aliased(saved.tape.aliases):  # reversible segments inside a layer are evaluated again
            found = super().backward(layers, microbatch, saved, message)
        # A parameter that was frozen in the meantime gets no gradient.
        originals = {alias: p for p, alias in saved.tape.aliases.items() if p.requires_grad}
        gradients = {
            originals[alias]: _hooked(originals[alias], gradient)
            for alias, gradient in found.parameters.items()
            if alias in originals
        }
        return found._replace(parameters=gradients)


@torch.no_grad()
def _hooked(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Apply the parameter's hooks to a gradient that was computed for its alias."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient
