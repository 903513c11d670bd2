"""One action of one stage: the unit that every schedule is made of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_PATTERN = re.compile(r"(\d+)([FBL](?=\d)|U)(-?\d+)")


class Kind(StrEnum):
    """The kinds of actions. The values are the letters used in printed schedules."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"
    LEARN = "L"
    """A gradient synthesizer learns from the true gradient (DNI)."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action: a stage, what it does, and for which micro-batch.

    `str(action)` gives a short form that `parse` reads back: `2F0` is the forward of micro-batch 0 on stage 2.
    """

    stage: int
    """The stage, counted from 0."""
    kind: Kind
    """The kind of action."""
    microbatch: int
    """The micro-batch, counted from 0.

    An update names the last micro-batch whose gradient it contains. A negative number stands for the zero features
    that Features Replay assumes before the first micro-batch; their gradient is zero as well.
    """

    def shifted(self, by: int) -> Action:
        """Return the same action for another micro-batch.

        Args:
            by: The number to add to that of the micro-batch.

        Returns:
            The action.
        """
        return Action(self.stage, self.kind, self.microbatch + by)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse an action that `str(action)` printed.

        Args:
            text: The stage, one of the letters F, B, U and L, and the micro-batch, for example `2F0`.

        Returns:
            The action.

        Raises:
            ValueError: The text is not an action.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an action: write stage, F, B, U or L, and micro-batch, like 2F0")
        stage, kind, microbatch = match.groups()
        return cls(int(stage), Kind(kind), int(microbatch))
