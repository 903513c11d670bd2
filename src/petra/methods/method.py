"""The interface of a training method: what a stage saves, which weights its backward uses, and when it acts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from petra.methods.stage_layers import StageLayers
from petra.methods.synthesizer import Synthesizer
from petra.methods.tape import Tape
from petra.reversible.gradients import Reversal
from petra.reversible.streams import Gradients, Streams
from petra.schedule import PipelineSchedule


@dataclass
class SavedState:
    """The state that a stage saves for one micro-batch between its forward and its backward."""

    inputs: list[Streams] = field(default_factory=list)
    """Inputs from which segments will be recomputed, lowest segment first."""
    tape: Tape | None = None
    """A recorded graph: of all layers, or of the topmost segment if there are inputs as well."""
    tapes: dict[int, Tape] = field(default_factory=dict)
    """The recorded graphs of segments that are stored, by the index of the segment; their inputs are in `inputs`."""
    weights: Sequence[Tensor] | None = None
    """The weights of the forward, if the method stashes them and they have changed since."""

    @property
    def graphs(self) -> list[Tape]:
        """All recorded graphs."""
        return [*([] if self.tape is None else [self.tape]), *self.tapes.values()]


@dataclass(frozen=True)
class BackwardMessage:
    """The message that a stage sends to the stage below."""

    streams: Streams | None
    """The outputs of the stage below, if its method `needs_outputs`."""
    gradients: Gradients
    """The gradients of these outputs; None for a stream without a gradient."""


class Method(ABC):
    """A training method.

    A method is a stateless object: the stage owns everything that is saved. To add a method, derive from this class or
    from a similar method, and pass an instance to `Trainer(method=…)`.
    """

    name: ClassVar[str]
    """The name that `--method` takes."""
    summary: ClassVar[str]
    """One line for `petra methods`."""
    saves: ClassVar[str]
    """For `petra methods`: what a stage saves per micro-batch in flight."""
    backward_weights: ClassVar[str] = "current"
    """For `petra methods`: which weights the backward uses."""
    stashes_weights: ClassVar[bool] = False
    """True if the backward uses the weights of its forward, which the stage has to stash."""
    stale: ClassVar[bool] = True
    """True if weights can be updated between a forward and its backward."""
    saves_graphs: ClassVar[bool] = False
    """True if autograd graphs are saved across updates."""
    pipelined: ClassVar[bool] = True
    """True if stages may work on different micro-batches across updates, so that every schedule can be used."""

    @abstractmethod
    def schedule(self, stages: int, accumulate: int) -> PipelineSchedule:
        """Return the default schedule.

        Args:
            stages: The number of stages.
            accumulate: The number of micro-batches per update.

        Returns:
            The schedule. The user may choose another one.
        """

    @abstractmethod
    def forward(self, layers: StageLayers, microbatch: int, inputs: Streams, final: bool) -> tuple[Streams, SavedState]:
        """Run the forward of a stage.

        Args:
            layers: The layers of the stage.
            microbatch: The number of the micro-batch, from which random numbers are derived.
            inputs: The inputs of the stage.
            final: True for the last stage, whose backward follows at once.

        Returns:
            The outputs, and the state that the backward will need.
        """

    @abstractmethod
    def backward(self, layers: StageLayers, microbatch: int, saved: SavedState, message: BackwardMessage) -> Reversal:
        """Run the backward of a stage.

        Args:
            layers: The layers of the stage.
            microbatch: The number of the micro-batch.
            saved: The state that `forward` returned, with stashed weights if the method stashes them.
            message: The message from the stage above, with the stage's outputs if it `needs_outputs`.

        Returns:
            The inputs of the stage, and the gradients of inputs and parameters.
        """

    def synthesizer(self, layers: StageLayers) -> Synthesizer | None:
        """Create the synthesizer of a stage below the last one.

        Args:
            layers: The layers of the stage.

        Returns:
            A predictor of the gradient of the stage's outputs, or None if the stage waits for the gradient.
        """
        return None

    def needs_outputs(self, layers: StageLayers) -> bool:
        """Return True if the backward of a stage starts from its outputs.

        Args:
            layers: The layers of the stage.

        Returns:
            True if the stage above has to send the outputs back, with their gradients.
        """
        return False
