"""One action of one stage: the atom every schedule is made of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_PATTERN = re.compile(r"(\d+)([FBL](?=\d)|U)(-?\d+)")


class Kind(StrEnum):
    """What a stage does in one action."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"
    LEARN = "L"


@dataclass(frozen=True, slots=True)
class Action:
    """Stage ``stage`` does ``kind`` for micro-batch ``microbatch``, both counted from 0.

    ``2F0`` is the forward of micro-batch 0 on stage 2. An update names the last micro-batch whose
    gradient is in it; a negative one stands for features before the first micro-batch, which are zero and
    so is their gradient. ``2L0``: what predicts gradients on stage 2 learns from the true one of micro-batch 0.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what ``str(action)`` wrote."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an action: write stage, F, B, U or L, and micro-batch, like 2F0")
        stage, kind, microbatch = match.groups()
        return cls(int(stage), Kind(kind), int(microbatch))
