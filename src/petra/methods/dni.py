"""DNI: stages do not wait for their gradients, they predict them."""

from __future__ import annotations

from math import inf

from petra.methods.backprop import Backprop
from petra.methods.chain import Chain
from petra.methods.synthesizer import Synthesizer
from petra.schedule import Decoupled, Order


class DNI(Backprop):
    """Each stage but the last goes backward at once, with the gradient that its synthesizer makes of its outputs.

    Decoupled neural interfaces (Jaderberg et al., "Decoupled Neural Interfaces using Synthetic Gradients", 2017). The
    synthesizer learns from the gradient that the stage above finds at its input, itself with a predicted gradient.
    """

    name = "dni"
    summary = "each stage goes backward at once, with a gradient that it predicts (DNI)"
    keeps = "graph, and a synthesizer of gradients"

    def __init__(self, learning_rate: float = 1e-5) -> None:
        if not (isinstance(learning_rate, int | float) and 0 <= learning_rate < inf):
            raise ValueError(f"learning_rate is {learning_rate!r}: give a number, 0 or more, like 1e-5")
        self.learning_rate = learning_rate
        """Of the synthesizers' own optimizer, Adam."""

    def order(self, stages: int, accumulate: int) -> Order:
        return Decoupled(stages, accumulate)

    def synthesizer(self, chain: Chain) -> Synthesizer:
        return Synthesizer(chain.layers, chain.stop, chain.settings.seed, self.learning_rate, chain.above)
