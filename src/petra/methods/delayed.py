"""Delayed gradients from saved inputs: the pipelines that PETRA is compared with."""

from __future__ import annotations

from petra.methods.method import BackwardMessage, Method, SavedState
from petra.methods.stage_layers import StageLayers
from petra.reversible.gradients import Reversal
from petra.reversible.streams import Streams
from petra.schedule import PipelineSchedule, low_staleness


class Checkpointed(Method):
    """Saves each input and recomputes the stage with its current weights.

    DSP (Xu et al., 2019) and PipeMare (Yang et al., 2021); line 3 of Tables 3 and 4 in the PETRA paper.
    """

    name = "checkpointed"
    summary = "delayed gradients from saved inputs and current weights (DSP, PipeMare)"
    saves = "stage input"

    def schedule(self, stages: int, accumulate: int) -> PipelineSchedule:
        return low_staleness(stages, accumulate)

    def forward(self, layers: StageLayers, microbatch: int, inputs: Streams, final: bool) -> tuple[Streams, SavedState]:
        if final:  # the weights do not change before the backward: recomputation would give the same graph
            tape = layers.record(layers.all_layers, inputs, microbatch)
            return tuple(y.detach() for y in tape.outputs), SavedState(tape=tape)
        return layers.evaluate(layers.all_layers, inputs, microbatch), SavedState(inputs=[layers.prune_inputs(inputs)])

    def backward(self, layers: StageLayers, microbatch: int, saved: SavedState, message: BackwardMessage) -> Reversal:
        with layers.using(saved.weights):
            tape = saved.tape or layers.record(layers.all_layers, saved.inputs[0], microbatch)
            return tape.gradients(message.gradients)


class Delayed(Checkpointed):
    """Saves each input and the weights of its forward, so gradients are exact for these older weights.

    PipeDream (Harlap et al., 2018); line 1 of Table 3 and line 2 of Table 4 in the PETRA paper. Weights are copied only
    when an update would overwrite a version that a micro-batch in flight still needs.
    """

    name = "delayed"
    summary = "delayed gradients from saved inputs and stashed weights (PipeDream)"
    saves = "stage input + weights"
    backward_weights = "of its forward"
    stashes_weights = True
