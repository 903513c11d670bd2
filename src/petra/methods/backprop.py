"""Backprop and its synchronous pipelines: every stage keeps its graph, gradients are exact.

They give the same gradients bit for bit and differ in when stages wait: backprop runs one micro-batch at
a time, GPipe and 1F1B overlap the micro-batches of one update and leave a bubble at its ends.
"""

from __future__ import annotations

from petra.methods.chain import Chain
from petra.methods.method import BackwardMessage, Kept, Method
from petra.reversible.gradients import Reversal
from petra.reversible.streams import Streams
from petra.schedule import GPipe, OneForwardOneBackward, Order, Sequential


class Backprop(Method):
    """Forward with a graph, backward through it (PETRA paper, Eq. 1-3)."""

    name = "backprop"
    summary = "exact gradients, one micro-batch at a time"
    keeps = "graph"
    stale = False
    pipelined = False

    def order(self, stages: int, accumulate: int) -> Order:
        return Sequential(stages, accumulate)

    def forward(self, chain: Chain, microbatch: int, inputs: Streams, final: bool) -> tuple[Streams, Kept]:
        tape = chain.record(chain.whole, inputs, microbatch)
        return tuple(y.detach() for y in tape.outputs), Kept(tape=tape)

    def backward(self, chain: Chain, microbatch: int, kept: Kept, message: BackwardMessage) -> Reversal:
        assert kept.tape is not None
        return kept.tape.gradients(message.gradients)


class GPipeBackprop(Backprop):
    """GPipe (Huang et al., 2019): all forwards of an update, then all backwards."""

    name = "gpipe"
    summary = "exact gradients, micro-batches of one update overlap, with a bubble"
    keeps = "graph, k of them"

    def order(self, stages: int, accumulate: int) -> Order:
        return GPipe(stages, accumulate)


class OneForwardOneBackwardBackprop(Backprop):
    """1F1B with a flush (Fan et al., 2021): the bubble of GPipe, but only as many graphs as stages above."""

    name = "1f1b"
    summary = "exact gradients, like gpipe with fewer graphs alive"
    keeps = "graph, at most J-s of them"

    def order(self, stages: int, accumulate: int) -> Order:
        return OneForwardOneBackward(stages, accumulate)
