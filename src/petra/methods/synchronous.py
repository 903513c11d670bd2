"""Backprop and its synchronous pipelines: every stage saves its autograd graph, and gradients are exact.

They compute the same gradients bit for bit and differ in when stages wait. Backprop runs one micro-batch at a time.
GPipe and 1F1B overlap the micro-batches of one update, with a bubble at the beginning and the end of each.
"""

from __future__ import annotations

from petra.methods.method import BackwardMessage, Method, SavedState
from petra.methods.stage_layers import StageLayers
from petra.reversible.gradients import Reversal
from petra.reversible.streams import Streams
from petra.schedule import GPipeSchedule, OneFOneBSchedule, PipelineSchedule, SequentialSchedule


class Backprop(Method):
    """Forward with an autograd graph, backward through it (PETRA paper, Eq. 1-3)."""

    name = "backprop"
    summary = "exact gradients, one micro-batch at a time"
    saves = "graph"
    stale = False
    pipelined = False

    def schedule(self, stages: int, accumulate: int) -> PipelineSchedule:
        return SequentialSchedule(stages, accumulate)

    def forward(self, layers: StageLayers, microbatch: int, inputs: Streams, final: bool) -> tuple[Streams, SavedState]:
        tape = layers.record(layers.all_layers, inputs, microbatch)
        return tuple(y.detach() for y in tape.outputs), SavedState(tape=tape)

    def backward(self, layers: StageLayers, microbatch: int, saved: SavedState, message: BackwardMessage) -> Reversal:
        assert saved.tape is not None
        return saved.tape.gradients(message.gradients)


class GPipeBackprop(Backprop):
    """GPipe (Huang et al., 2019): all forwards of an update, then all its backwards."""

    name = "gpipe"
    summary = "exact gradients, micro-batches of one update overlap, with a bubble"
    saves = "graph, k of them"

    def schedule(self, stages: int, accumulate: int) -> PipelineSchedule:
        return GPipeSchedule(stages, accumulate)


class OneForwardOneBackwardBackprop(Backprop):
    """1F1B with a flush (Fan et al., 2021): the bubble of GPipe, but at most J-s graphs at stage s."""

    name = "1f1b"
    summary = "exact gradients, like gpipe with fewer graphs alive"
    saves = "graph, at most J-s of them"

    def schedule(self, stages: int, accumulate: int) -> PipelineSchedule:
        return OneFOneBSchedule(stages, accumulate)
