"""PETRA, and reversible backprop, which is the same computation without the pipeline."""

from __future__ import annotations

from typing import ClassVar

from petra.methods.chain import Chain
from petra.methods.method import BackwardMessage, Kept, Method
from petra.reversible.gradients import ParameterGradients, Reversal, add_gradients
from petra.reversible.streams import Streams, ordered
from petra.schedule import Order, Sequential, low_staleness


class Petra(Method):
    """Reversible layers keep nothing and are reconstructed with the current weights (Eq. 5, Alg. 1).

    Layers that are not reversible keep the input of their run (Alg. 1, lines 7-8 and 15-17). A stage of
    both kinds is treated run by run, so it buffers no more than the same layers cut finer would.
    """

    name = "petra"
    summary = "delayed gradients from reconstructed inputs and current weights, no buffers"
    keeps = "nothing (input of layers that are not reversible)"
    overlaps: ClassVar[bool] = False
    """Whether a coupling is reconstructed beside the gradient of the one above it."""

    def order(self, stages: int, accumulate: int) -> Order:
        return low_staleness(stages, accumulate)

    def forward(self, chain: Chain, microbatch: int, inputs: Streams, final: bool) -> tuple[Streams, Kept]:
        kept = Kept()
        streams = inputs
        for segment in chain.segments:
            if segment.reversible:
                streams = chain.evaluate(segment, streams, microbatch)
            elif final and segment is chain.segments[-1]:  # Alg. 1, lines 28-30: the loss follows at once
                kept.tape = chain.record(segment, streams, microbatch)
                streams = tuple(y.detach() for y in kept.tape.outputs)
            else:
                # What repeats its values is copied: only a placeholder is kept like that (`Chain.essential`).
                kept.inputs.append(tuple(ordered(x, False) if 0 in x.stride() else x for x in streams))
                streams = chain.evaluate(segment, streams, microbatch)
        return streams, kept

    def backward(self, chain: Chain, microbatch: int, kept: Kept, message: BackwardMessage) -> Reversal:
        streams, gradients, weights = message.streams, message.gradients, kept.weights
        total: ParameterGradients = {}
        buffered = list(kept.inputs)
        for segment in reversed(chain.segments):
            if segment.reversible:
                assert streams is not None
                found = (
                    chain.reverse(segment, streams, gradients, microbatch, self.overlaps)
                    if weights is None
                    else chain.reverse_with(weights, segment, streams, gradients, microbatch)
                )
            elif kept.tape is not None and segment is chain.segments[-1]:
                found = kept.tape.gradients(gradients)
            else:
                with chain.using(weights):
                    found = chain.record(segment, buffered.pop(), microbatch).gradients(gradients)
            streams, gradients, parameters = found
            streams = tuple(x.detach() for x in streams)
            add_gradients(total, parameters)
        assert streams is not None
        return Reversal(streams, gradients, total)

    def needs_outputs(self, chain: Chain) -> bool:
        return chain.segments[-1].reversible


class StashedPetra(Petra):
    """Inputs reconstructed with current weights, gradients with those of the forward (Table 4, line 4)."""

    name = "petra-stashed"
    summary = "delayed gradients from reconstructed inputs and stashed weights (Table 4, line 4)"
    keeps = "weights (and input of layers that are not reversible)"
    backward_weights = "of its forward"
    stashes_weights = True


class ReversibleBackprop(Petra):
    """Exact backprop without stored activations (RevNet): one micro-batch at a time, so nothing is stale."""

    name = "reversible"
    summary = "exact gradients from reconstructed inputs, one micro-batch at a time (RevNet)"
    stale = False
    pipelined = False

    def order(self, stages: int, accumulate: int) -> Order:
        return Sequential(stages, accumulate)


class PaReprop(ReversibleBackprop):
    """Reversible backprop that reconstructs one residual function beside the gradient of the next (PaReprop).

    On a GPU, that is, and with more than one residual function in a stage. The numbers are the same.
    """

    name = "pareprop"
    summary = "like reversible, reconstruction and gradients side by side on a GPU (PaReprop)"
    overlaps = True
