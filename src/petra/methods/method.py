"""What a training method is: what a stage keeps, which weights it uses backward, when it acts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from petra.methods.chain import Chain, Tape
from petra.methods.synthesizer import Synthesizer
from petra.reversible.gradients import Reversal
from petra.reversible.streams import Gradients, Streams
from petra.schedule import Order


@dataclass
class Kept:
    """What a stage holds of one micro-batch between its forward and its backward."""

    inputs: list[Streams] = field(default_factory=list)
    """Inputs from which layers will be recomputed, lowest first."""
    tape: Tape | None = None
    """A recorded graph; of the topmost segment if there are inputs too."""
    weights: Sequence[Tensor] | None = None
    """The weights of the forward, if the method stashes them and they have changed since."""


@dataclass(frozen=True)
class BackwardMessage:
    """What a stage sends down: gradients, and where they were taken if the stage below needs that."""

    streams: Streams | None
    gradients: Gradients


class Method(ABC):
    """A way of training. It holds no state: the stage owns what is kept."""

    name: ClassVar[str]
    summary: ClassVar[str]
    keeps: ClassVar[str]
    """In words: what is kept per micro-batch in flight."""
    backward_weights: ClassVar[str] = "current"
    """In words: the weights of the backward pass."""
    stashes_weights: ClassVar[bool] = False
    """Whether the backward pass uses the weights of its forward pass."""
    stale: ClassVar[bool] = True
    """Whether there are updates between a forward and its backward."""
    keeps_graphs: ClassVar[bool] = False
    """Whether graphs of older micro-batches wait from tick to tick while weights are updated."""
    pipelined: ClassVar[bool] = True
    """Whether stages work on different micro-batches at any time, so that there are several orders to choose from."""

    @abstractmethod
    def order(self, stages: int, accumulate: int) -> Order:
        """The order in which stages act, unless a pipelined method is given another."""

    @abstractmethod
    def forward(self, chain: Chain, microbatch: int, inputs: Streams, final: bool) -> tuple[Streams, Kept]:
        """Outputs, and what to keep. ``final``: this is the last stage, where the loss follows at once."""

    @abstractmethod
    def backward(self, chain: Chain, microbatch: int, kept: Kept, message: BackwardMessage) -> Reversal:
        """Gradients of inputs and parameters, and the inputs that they were taken at.

        The message from above carries the stage's outputs if it `needs_outputs`.
        """

    def synthesizer(self, chain: Chain) -> Synthesizer | None:
        """What predicts the gradient of a stage below the last, if that does not wait for it."""
        return None

    def needs_outputs(self, chain: Chain) -> bool:
        """Whether the backward of this stage starts from its outputs."""
        return False
