"""Delayed gradients from kept inputs: the pipelines that PETRA is compared with."""

from __future__ import annotations

from petra.methods.chain import Chain
from petra.methods.method import BackwardMessage, Kept, Method
from petra.reversible.gradients import Reversal
from petra.reversible.streams import Streams
from petra.schedule import Order, low_staleness


class Checkpointed(Method):
    """Keeps each input and recomputes the stage with its current weights.

    DSP (Xu et al., 2019) and PipeMare (Yang et al., 2021); lines 3 of Tables 3 and 4 in the PETRA paper.
    """

    name = "checkpointed"
    summary = "delayed gradients from kept inputs and current weights (DSP, PipeMare)"
    keeps = "stage input"

    def order(self, stages: int, accumulate: int) -> Order:
        return low_staleness(stages, accumulate)

    def forward(self, chain: Chain, microbatch: int, inputs: Streams, final: bool) -> tuple[Streams, Kept]:
        if final:  # nothing changes before the backward: recomputing would give this very graph
            tape = chain.record(chain.whole, inputs, microbatch)
            return tuple(y.detach() for y in tape.outputs), Kept(tape=tape)
        return chain.evaluate(chain.whole, inputs, microbatch), Kept(inputs=[chain.essential(inputs)])

    def backward(self, chain: Chain, microbatch: int, kept: Kept, message: BackwardMessage) -> Reversal:
        with chain.using(kept.weights):
            tape = kept.tape or chain.record(chain.whole, kept.inputs[0], microbatch)
            return tape.gradients(message.gradients)


class Delayed(Checkpointed):
    """Keeps each input and the weights of its forward, so the gradient is exact for old weights.

    PipeDream (Harlap et al., 2018); lines 1 of Table 3 and 2 of Table 4. Weights are copied only when an
    update would overwrite a version that a micro-batch in flight still needs.
    """

    name = "delayed"
    summary = "delayed gradients from kept inputs and stashed weights (PipeDream)"
    keeps = "stage input + weights"
    backward_weights = "of its forward"
    stashes_weights = True
