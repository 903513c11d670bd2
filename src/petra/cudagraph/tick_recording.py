"""A tick while it is being captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from petra.cudagraph.graph_capture import Launch
from petra.cudagraph.lr_tensor import LearningRateTensor
from petra.cudagraph.ring_buffers import Copy, QueueChange
from petra.cudagraph.steady_state import SteadyState
from petra.pipeline import MicrobatchResult
from petra.reversible.streams import Streams
from petra.schedule import Action


@dataclass
class TickRecording:
    """The state of a tick during its capture. The captured work starts with `begin` and ends with `finish`."""

    steady: SteadyState
    actions: list[Action]
    inputs: Streams
    """Static memory for the inputs, where they are used."""
    targets: Any
    results: list[MicrobatchResult] = field(default_factory=list)
    changes: list[QueueChange] = field(default_factory=list)
    """How each queue changes."""
    launch: Launch | None = None
    """Does the work of the device again; None if it could not be captured."""
    rates: LearningRateTensor = field(init=False)
    _references: list[int] = field(init=False)

    def begin(self) -> None:
        """Read from the ring buffers what the tick takes."""
        self._references = self.steady.references()
        self.steady.fetch(self.actions)

    def finish(self, found: Sequence[MicrobatchResult], gradients: Sequence[Copy]) -> None:
        """Write to the ring buffers what waits after the tick.

        Args:
            found: The micro-batches that reached the loss.
            gradients: The copies that keep gradients in static memory.
        """
        # The targets of the new micro-batch may be about to take the place of these.
        self.results = [replace(r, targets=r.targets.clone()) for r in found]
        self.changes = self.steady.store(self._references, gradients)
