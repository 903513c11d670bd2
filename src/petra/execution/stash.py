"""Old versions of a stage's weights, for methods that go backward with the weights of the forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class WeightStash:
    """Copies a version only when an update is about to overwrite it and a micro-batch still needs it.

    With accumulation k that makes about τ/k copies, not one for each micro-batch in flight.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._version = 0
        self._needed: dict[int, int] = {}  # micro-batch -> version of its forward
        self.copies: dict[int, list[Tensor]] = {}

    def keep(self, microbatch: int) -> None:
        """The forward of ``microbatch`` has used the current weights."""
        self._needed[microbatch] = self._version

    def take(self, microbatch: int) -> list[Tensor] | None:
        """The weights of the forward of ``microbatch``, None if they are still the current ones."""
        version = self._needed.pop(microbatch)
        copy = self.copies.get(version)
        if version not in self._needed.values():
            self.copies.pop(version, None)
        return copy

    def before_update(self) -> None:
        """The current weights are about to change."""
        if self._version in self._needed.values():
            self.copies[self._version] = [p.detach().clone() for p in self._parameters]
        self._version += 1

    def state_dict(self) -> dict[str, Any]:
        return {"version": self._version, "needed": dict(self._needed), "copies": dict(self.copies)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._version = state["version"]
        self._needed = dict(state["needed"])
        self.copies = dict(state["copies"])
