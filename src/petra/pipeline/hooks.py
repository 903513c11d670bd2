"""Hooks of an executor: observers, clocks, and other ways to run ticks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from petra.pipeline.results import MicrobatchResult
from petra.pipeline.stage import Stage
from petra.reversible.streams import Streams
from petra.schedule import Action, Tick

Observer = Callable[[int, Action, Stage], None]
"""Called after every action with the tick, the action and its stage."""
Announcement = Callable[[int, Tick], None]
Clock = Callable[[int, Action, float, float, float], None]
Perform = Callable[[Tick], list[MicrobatchResult]]


class HasHostState(Protocol):
    """An object whose host state can be saved and restored."""

    def host_state(self) -> Any:
        """Return everything that the host remembers between two ticks, without copying tensors."""

    def load_host_state(self, state: Any) -> None:
        """Return to an earlier `host_state`."""


class TickRunner(Protocol):
    """Runs the ticks of an executor in another way than action by action, such as a captured CUDA graph."""

    ineligible_reason: str | None
    """Why no tick can be captured; None if there is no known reason."""
    captured_ticks: int
    """The number of ticks that ran as captured graphs."""

    def run_tick(self, inputs: Streams, targets: Any, weight: float) -> list[MicrobatchResult]:
        """Run one tick, on its own or with `Executor.run_tick`.

        Args:
            inputs: The inputs of the network, on the device.
            targets: The targets of the loss.
            weight: The weight of the gradient in the mean over replicas.

        Returns:
            The micro-batches that reached the loss in this tick.
        """

    def synchronize(self) -> None:
        """Finish what is still checked asynchronously, such as losses."""

    def reset(self) -> None:
        """Forget what is assumed about the state of the pipeline, because it was changed elsewhere."""
