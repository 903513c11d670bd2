"""The highest learning rates of a stage, for what goes with how far they have fallen."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor


class Peaks:
    """The highest learning rate that each group of an optimizer has had.

    Stages without delay remember theirs too: at another cut, their layers may be late.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._rates: list[float] = []  # by the number of the group
        self.see()

    def see(self) -> None:
        """Look at the learning rates of this moment."""
        now = [float(group.get("lr", 0.0)) for group in self._optimizer.param_groups]
        self._rates = [max(pair) for pair in zip_longest(self._rates, now, fillvalue=0.0)]

    def of(self, group: dict[str, Any]) -> float:
        """That of a group of the optimizer."""
        return next(rate for own, rate in zip(self._optimizer.param_groups, self._rates, strict=True) if own is group)

    def state_dict(self) -> dict[Tensor, float]:
        """With parameters themselves as keys, for they may be in other groups where this is taken up."""
        groups = zip(self._optimizer.param_groups, self._rates, strict=True)
        return {p: rate for group, rate in groups for p in group["params"]}

    def load_state_dict(self, state: Mapping[Tensor, float]) -> None:
        """Take up what `state_dict` gave, once the optimizer has its own state; what is not in it begins now."""
        groups = self._optimizer.param_groups
        self._rates = [max((state.get(p, 0.0) for p in group["params"]), default=0.0) for group in groups]
        self.see()
