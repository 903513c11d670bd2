"""Recorded evaluations: the autograd graph of a segment, ready for one backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from petra.methods.segment import LayerError
from petra.reversible.gradients import Reversal, saved_tensors, vjp
from petra.reversible.streams import Gradients, Streams

Aliases = dict[nn.Parameter, nn.Parameter]
"""Parameters, each with another parameter that shares its memory and stands in for it in a graph."""


@dataclass(frozen=True)
class Tape:
    """An evaluation with its autograd graph, which can be differentiated once."""

    inputs: Streams
    """The inputs, which are leaves of the graph."""
    outputs: Streams
    """The outputs."""
    parameters: list[nn.Parameter]
    """The parameters whose gradients are computed."""
    aliases: Aliases | None = None
    """Stand-ins for the stage's parameters in the graph, if the graph does not refer to the parameters themselves."""

    def gradients(self, gradients: Gradients) -> Reversal:
        """Propagate gradients of the outputs to inputs and parameters.

        Args:
            gradients: The gradient of each output; None for an output without one.

        Returns:
            The inputs, and the gradients of inputs and parameters.

        Raises:
            LayerError: A layer overwrote a tensor that the graph needs.
        """
        try:
            return vjp(self.outputs, self.inputs, self.parameters, gradients)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise LayerError(
                "a tensor that the graph of a micro-batch needs was written into before its backward: if a layer "
                "computes with a buffer that it changes in place, let it use a copy, like self.average.clone()"
            ) from error

    def tensors(self) -> list[Tensor]:
        """Return all tensors that the tape keeps alive.

        Returns:
            Inputs, outputs, and the tensors that the graph has saved. A tensor may occur several times.
        """
        return [*self.inputs, *self.outputs, *saved_tensors(self.outputs)]
