"""Old versions of a stage's weights, for methods that go backward with the weights of the forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

Version = tuple[int, int]
"""How many updates there were before, and how many more were predicted."""


class WeightStash:
    """Copies a version only when an update is about to overwrite it and a micro-batch still needs it.

    With accumulation k that makes about τ/k copies, not one for each micro-batch in flight.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], moves: bool = False) -> None:
        self._parameters = parameters
        self._moves = moves  # whether graphs point into the memory of old weights, so that it has to stay theirs
        self._version = 0
        self._needed: dict[int, Version] = {}  # micro-batch -> version of its forward
        self.copies: dict[Version, list[Tensor]] = {}

    def keep(self, microbatch: int, ahead: int = 0, predicted: list[Tensor] | None = None) -> None:
        """The forward of ``microbatch`` has used the current weights, or what they are ``predicted`` to be ``ahead``.

        A prediction belongs to nobody else, so it is kept as it is, once for all micro-batches that have used it.
        """
        version = self._version, ahead if predicted is not None else 0
        self._needed[microbatch] = version
        if predicted is not None:
            self.copies.setdefault(version, predicted)

    def take(self, microbatch: int) -> list[Tensor] | None:
        """The weights of the forward of ``microbatch``, None if they are still the current ones."""
        version = self._needed.pop(microbatch)
        copy = self.copies.get(version)
        if version not in self._needed.values():
            self.copies.pop(version, None)
        return copy

    def before_update(self) -> None:
        """The current weights are about to change."""
        if (self._version, 0) in self._needed.values():
            copies = [p.data.clone() for p in self._parameters]
            if self._moves:
                for parameter, copy in zip(self._parameters, copies, strict=True):
                    parameter.data, copy.data = copy.data, parameter.data
            self.copies[self._version, 0] = copies
        self._version += 1

    def advance(self) -> None:
        """What a tick of a full pipeline does to the numbers, with an update in it; copies are another's business."""
        if self._needed:
            self._needed[max(self._needed) + 1] = self._version, 0
            del self._needed[min(self._needed)]
        self._version += 1

    def state_dict(self) -> dict[str, Any]:
        return {"version": self._version, "needed": dict(self._needed), "copies": dict(self.copies)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._version = state["version"]
        self._needed = {m: _whole(version) for m, version in state["needed"].items()}
        self.copies = {_whole(version): copy for version, copy in state["copies"].items()}


def _whole(version: int | Version) -> Version:
    """Checkpoints of before there were predictions have the first number alone."""
    return (version, 0) if isinstance(version, int) else version
