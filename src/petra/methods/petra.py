"""PETRA, and reversible backprop, which is the same computation without the pipeline."""

from __future__ import annotations

from typing import ClassVar

from petra.methods.method import BackwardMessage, Method, SavedState
from petra.methods.stage_layers import StageLayers
from petra.reversible.gradients import ParameterGradients, Reversal, add_gradients
from petra.reversible.streams import Streams, with_layout
from petra.schedule import PipelineSchedule, SequentialSchedule, low_staleness


class Petra(Method):
    """PETRA: reversible layers save nothing and are reconstructed with the current weights (Eq. 5, Alg. 1).

    Segments of layers that are not reversible save their input (Alg. 1, lines 7-8 and 15-17). A stage with both kinds
    is processed segment by segment. It therefore buffers no more than stages of the single segments would.
    """

    name = "petra"
    summary = "delayed gradients from reconstructed inputs and current weights, no buffers"
    saves = "nothing (input of layers that are not reversible)"
    overlaps: ClassVar[bool] = False
    """True if each coupling is reconstructed concurrently with the gradient of the coupling above it."""

    def schedule(self, stages: int, accumulate: int) -> PipelineSchedule:
        return low_staleness(stages, accumulate)

    def forward(self, layers: StageLayers, microbatch: int, inputs: Streams, final: bool) -> tuple[Streams, SavedState]:
        saved = SavedState()
        streams = inputs
        for index, segment in enumerate(layers.segments):
            if segment.reversible:
                streams = layers.evaluate(segment, streams, microbatch)
            elif final and segment is layers.segments[-1]:  # Alg. 1, lines 28-30: the loss follows at once
                saved.tape = layers.record(segment, streams, microbatch)
                streams = tuple(y.detach() for y in saved.tape.outputs)
            else:
                # Expanded tensors are copied: in saved inputs, stride 0 marks a placeholder (`prune_inputs`).
                saved.inputs.append(tuple(with_layout(x, False) if 0 in x.stride() else x for x in streams))
                if segment.stored and not self.stale:
                    tape = saved.tapes[index] = layers.record(segment, saved.inputs[-1], microbatch)
                    streams = tuple(y.detach() for y in tape.outputs)
                else:
                    streams = layers.evaluate(segment, streams, microbatch)
        return streams, saved

    def backward(self, layers: StageLayers, microbatch: int, saved: SavedState, message: BackwardMessage) -> Reversal:
        streams, gradients, weights = message.streams, message.gradients, saved.weights
        total: ParameterGradients = {}
        buffered = list(saved.inputs)
        for index, segment in reversed(list(enumerate(layers.segments))):
            if segment.reversible:
                assert streams is not None
                found = (
                    layers.reverse(segment, streams, gradients, microbatch, self.overlaps)
                    if weights is None
                    else layers.reverse_with_weights(weights, segment, streams, gradients, microbatch)
                )
            elif saved.tape is not None and segment is layers.segments[-1]:
                found = saved.tape.gradients(gradients)
            elif index in saved.tapes:
                buffered.pop()
                found = saved.tapes.pop(index).gradients(gradients)
            else:
                # The graph of a stored segment is not in a checkpoint, but its forward has updated the statistics.
                again = segment.stored and not self.stale
                with layers.using(weights):
                    tape = layers.record(segment, buffered.pop(), microbatch, update_statistics=not again)
                    found = tape.gradients(gradients)
            streams, gradients, parameters = found
            streams = tuple(x.detach() for x in streams)
            add_gradients(total, parameters)
        assert streams is not None
        return Reversal(streams, gradients, total)

    def needs_outputs(self, layers: StageLayers) -> bool:
        return layers.segments[-1].reversible


class StashedPetra(Petra):
    """Reconstructs inputs with the current weights; gradients use the weights of the forward (Table 4, line 4)."""

    name = "petra-stashed"
    summary = "delayed gradients from reconstructed inputs and stashed weights (Table 4, line 4)"
    saves = "weights (and input of layers that are not reversible)"
    backward_weights = "of its forward"
    stashes_weights = True


class ReversibleBackprop(Petra):
    """Exact backprop without stored activations (RevNet).

    Stages process one micro-batch at a time, or overlap those of one update (gpipe, 1f1b, interleaved). A reversible
    stage saves nothing, so its memory does not depend on the number of micro-batches in flight.
    """

    name = "reversible"
    summary = "exact gradients from reconstructed inputs (RevNet)"
    stale = False
    pipelined = False

    def schedule(self, stages: int, accumulate: int) -> PipelineSchedule:
        return SequentialSchedule(stages, accumulate)


class PaReprop(ReversibleBackprop):
    """Reversible backprop that overlaps reconstruction with gradient computation (PaReprop).

    On a GPU, one residual function is reconstructed on a second CUDA stream concurrently with the gradient of the next
    one, if the stage has several. The results are the same.
    """

    name = "pareprop"
    summary = "like reversible, reconstruction and gradients overlap on a GPU (PaReprop)"
    overlaps = True
