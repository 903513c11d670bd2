"""Old versions of a stage's weights, for methods whose backward uses the weights of the forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from petra.methods.segment import version_of

Version = tuple[int, int, int]
"""A version: updates so far, updates predicted ahead, index of the optimizer settings."""


class WeightStash:
    """Keeps the weights that micro-batches in flight still need.

    A version is copied only when an update is about to overwrite it and a micro-batch still needs it. With
    accumulation k that makes about τ/k copies, not one for each micro-batch in flight.

    Args:
        parameters: The parameters of the stage.
        graphs: Whether autograd graphs point into the memory of old weights, which must then stay theirs.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], graphs: bool = False) -> None:
        self._parameters = parameters
        self._graphs = graphs
        self._version = 0
        self._needed: dict[int, Version] = {}  # micro-batch -> version of its forward
        self._counts: list[int] | None = None  # version counters when graphs began to use them
        self._settings: object = None  # of the last prediction
        self._number = 0  # of those settings
        self.copies: dict[Version, list[Tensor]] = {}

    def keep(self, microbatch: int) -> None:
        """Note that the forward of ``microbatch`` used the current weights."""
        self._check()
        if self._graphs:
            self._counts = [version_of(p) for p in self._parameters]
        self._needed[microbatch] = self._version, 0, 0

    def keep_predicted(self, microbatch: int, ahead: int, predicted: list[Tensor], settings: object) -> None:
        """Keep weights predicted ``ahead`` updates into the future, which the forward of ``microbatch`` used.

        A prediction is never overwritten, so it is kept without a copy, once for all micro-batches that used it.
        """
        if settings != self._settings:
            self._settings, self._number = settings, self._number + 1
        self._needed[microbatch] = version = self._version, ahead, self._number
        self.copies.setdefault(version, predicted)

    def take(self, microbatch: int) -> list[Tensor] | None:
        """Return the weights of the forward of ``microbatch``; None if they are still the current ones."""
        self._check()
        version = self._needed.pop(microbatch)
        copy = self.copies.get(version)
        if version not in self._needed.values():
            self.copies.pop(version, None)
        return copy

    def before_update(self) -> None:
        """Copy the current weights if a micro-batch needs them, because an update is about to change them."""
        self._check()
        self._counts = None
        if (self._version, 0, 0) in self._needed.values():
            copies = [p.data.clone() for p in self._parameters]
            if self._graphs:
                for parameter, copy in zip(self._parameters, copies, strict=True):
                    parameter.data, copy.data = copy.data, parameter.data
            self.copies[self._version, 0, 0] = copies
        self._version += 1

    def _check(self) -> None:
        """Raise ValueError if weights that graphs need were modified; autograd does not notice that for aliases."""
        waiting = [m for m, version in self._needed.items() if version == (self._version, 0, 0)]
        if waiting and self._counts is not None and self._counts != [version_of(p) for p in self._parameters]:
            raise ValueError(
                "weights were modified between updates, but graphs in flight (of micro-batches "
                f"{', '.join(map(str, waiting))}) need their old values: modify them after drain(), or choose delayed"
            )

    def advance(self) -> None:
        """Advance the numbers by one tick of a full pipeline with an update; ring buffers hold the copies."""
        if self._needed:
            self._needed[max(self._needed) + 1] = self._version, 0, 0
            del self._needed[min(self._needed)]
        self._version += 1

    def host_state(self) -> Any:
        """Return which version each micro-batch needs and the copies, without copying tensors."""
        return self._version, dict(self._needed), dict(self.copies)

    def load_host_state(self, state: Any) -> None:
        """Return to an earlier `host_state`."""
        self._version, needed, copies = state
        self._needed, self.copies = dict(needed), dict(copies)

    def state_dict(self) -> dict[str, Any]:
        return {"version": self._version, "needed": dict(self._needed), "copies": dict(self.copies)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._version, self._counts = state["version"], None
        self._needed = dict(state["needed"])
        self.copies = dict(state["copies"])
        # It is not known which settings the numbers stand for, so the next prediction gets a new one.
        self._settings, self._number = None, max((number for *_, number in self.copies), default=0)
