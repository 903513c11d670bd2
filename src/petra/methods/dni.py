"""DNI: stages do not wait for their gradients, they predict them."""

from __future__ import annotations

from math import inf

from petra.methods.stage_layers import StageLayers
from petra.methods.synchronous import Backprop
from petra.methods.synthesizer import Synthesizer
from petra.schedule import DecoupledSchedule, PipelineSchedule


class DNI(Backprop):
    """Every stage except the last runs its backward right after its forward, with a predicted gradient.

    Decoupled neural interfaces (Jaderberg et al., "Decoupled Neural Interfaces using Synthetic Gradients", 2017). A
    `Synthesizer` predicts the gradient from the stage's outputs. It learns from the gradient that the stage above
    computes at its input, which itself depends on a predicted gradient.

    Args:
        learning_rate: The learning rate of the synthesizers' optimizer, Adam.

    Raises:
        ValueError: `learning_rate` is not a finite number of 0 or more.
    """

    name = "dni"
    summary = "each stage goes backward at once, with a gradient that it predicts (DNI)"
    saves = "graph, and a synthesizer of gradients"

    def __init__(self, learning_rate: float = 1e-5) -> None:
        if not (isinstance(learning_rate, int | float) and 0 <= learning_rate < inf):
            raise ValueError(f"learning_rate is {learning_rate!r}: give a number, 0 or more, like 1e-5")
        self.learning_rate = learning_rate

    def schedule(self, stages: int, accumulate: int) -> PipelineSchedule:
        return DecoupledSchedule(stages, accumulate)

    def synthesizer(self, layers: StageLayers) -> Synthesizer:
        return Synthesizer(layers, layers.stop, layers.settings.seed, self.learning_rate, layers.next_layer)
