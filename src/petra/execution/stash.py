"""Old versions of a stage's weights, for methods that go backward with the weights of the forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from petra.methods.segment import version_of

Version = tuple[int, int, int]
"""How many updates there were before, how many more were predicted, and by which settings of the optimizer."""


class WeightStash:
    """Copies a version only when an update is about to overwrite it and a micro-batch still needs it.

    With accumulation k that makes about τ/k copies, not one for each micro-batch in flight.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], moves: bool = False) -> None:
        self._parameters = parameters
        self._moves = moves  # whether graphs point into the memory of old weights, so that it has to stay theirs
        self._version = 0
        self._needed: dict[int, Version] = {}  # micro-batch -> version of its forward
        self._counts: list[int] | None = None  # how often each was written into when graphs began to point into it
        self._settings: object = None  # of the last prediction
        self._number = 0  # of those settings
        self.copies: dict[Version, list[Tensor]] = {}

    def keep(self, microbatch: int) -> None:
        """The forward of ``microbatch`` has used the current weights."""
        self._check()
        if self._moves:
            self._counts = [version_of(p) for p in self._parameters]
        self._needed[microbatch] = self._version, 0, 0

    def keep_predicted(self, microbatch: int, ahead: int, predicted: list[Tensor], settings: object) -> None:
        """The forward of ``microbatch`` has used what the weights are ``predicted`` to be ``ahead``, by ``settings``.

        A prediction belongs to nobody else, so it is kept as it is, once for all micro-batches that have used it.
        """
        if settings != self._settings:
            self._settings, self._number = settings, self._number + 1
        self._needed[microbatch] = version = self._version, ahead, self._number
        self.copies.setdefault(version, predicted)

    def take(self, microbatch: int) -> list[Tensor] | None:
        """The weights of the forward of ``microbatch``, None if they are still the current ones."""
        self._check()
        version = self._needed.pop(microbatch)
        copy = self.copies.get(version)
        if version not in self._needed.values():
            self.copies.pop(version, None)
        return copy

    def before_update(self) -> None:
        """The current weights are about to change."""
        self._check()
        self._counts = None
        if (self._version, 0, 0) in self._needed.values():
            copies = [p.data.clone() for p in self._parameters]
            if self._moves:
                for parameter, copy in zip(self._parameters, copies, strict=True):
                    parameter.data, copy.data = copy.data, parameter.data
            self.copies[self._version, 0, 0] = copies
        self._version += 1

    def _check(self) -> None:
        """Autograd would not notice, for graphs have parameters of their own in the same memory."""
        waiting = [m for m, version in self._needed.items() if version == (self._version, 0, 0)]
        if waiting and self._counts is not None and self._counts != [version_of(p) for p in self._parameters]:
            raise ValueError(
                "weights were written into between updates, and graphs that wait for their gradients (of micro-batches "
                f"{', '.join(map(str, waiting))}) need them as they were: write after drain(), or choose delayed"
            )

    def advance(self) -> None:
        """What a tick of a full pipeline does to the numbers, with an update in it; copies are another's business."""
        if self._needed:
            self._needed[max(self._needed) + 1] = self._version, 0, 0
            del self._needed[min(self._needed)]
        self._version += 1

    def state_dict(self) -> dict[str, Any]:
        return {"version": self._version, "needed": dict(self._needed), "copies": dict(self.copies)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._version, self._counts = state["version"], None
        self._needed = {m: _whole(version) for m, version in state["needed"].items()}
        self.copies = {_whole(version): copy for version, copy in state["copies"].items()}
        # What the numbers in there stand for is not known, so the next prediction has one of its own.
        self._settings, self._number = None, max((number for *_, number in self.copies), default=0)


def _whole(version: int | tuple[int, ...]) -> Version:
    """Older checkpoints have the first number alone, or the first two."""
    first, ahead, number, *_ = (*((version,) if isinstance(version, int) else version), 0, 0)
    return first, ahead, number
