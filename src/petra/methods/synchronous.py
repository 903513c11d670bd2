"""Backprop: every stage saves its autograd graph, and gradients are exact.

One micro-batch at a time, or with the schedules gpipe, 1f1b and interleaved, which overlap the micro-batches of one
update with a bubble at the beginning and the end of each. All compute the same gradients bit for bit.
"""

from __future__ import annotations

from petra.methods.method import BackwardMessage, Method, SavedState
from petra.methods.stage_layers import StageLayers
from petra.reversible.gradients import Reversal
from petra.reversible.streams import Streams
from petra.schedule import PipelineSchedule, SequentialSchedule


class Backprop(Method):
    """Forward with an autograd graph, backward through it (PETRA paper, Eq. 1-3)."""

    name = "backprop"
    summary = "exact gradients from saved graphs"
    saves = "graph"
    stale = False
    pipelined = False

    def schedule(self, stages: int, accumulate: int) -> PipelineSchedule:
        return SequentialSchedule(stages, accumulate)

    def forward(self, layers: StageLayers, microbatch: int, inputs: Streams, final: bool) -> tuple[Streams, SavedState]:
        tape = layers.record(layers.all_layers, inputs, microbatch)
        return tuple(y.detach() for y in tape.outputs), SavedState(tape=tape)

    def backward(self, layers: StageLayers, microbatch: int, saved: SavedState, message: BackwardMessage) -> Reversal:
        if saved.tape is not None:
            return saved.tape.gradients(message.gradients)
        # Resumed from a checkpoint, which holds no graph: recomputation gives the same one.
        with layers.using(saved.weights):
            tape = layers.record(layers.all_layers, saved.inputs[0], microbatch, update_statistics=False)
            return tape.gradients(message.gradients)
