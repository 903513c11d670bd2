"""The learning rates of a stage: the highest so far, and those that updates use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor


class PeakLearningRates:
    """The highest learning rate of each group of an optimizer so far.

    Stages without delay track theirs too, because their layers may be stale after resuming with another partition.

    Args:
        optimizer: The optimizer of a stage.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._peaks: list[float] = []  # by the index of the group
        self.observe()

    def observe(self) -> None:
        """Take the current learning rates into account."""
        current = [float(group.get("lr", 0.0)) for group in self._optimizer.param_groups]
        self._peaks = [max(pair) for pair in zip_longest(self._peaks, current, fillvalue=0.0)]

    def peak(self, group: dict[str, Any]) -> float:
        """Return the highest learning rate of a group.

        Args:
            group: A group of the optimizer.

        Returns:
            The highest learning rate that `observe` has seen.
        """
        return next(
            peak for known, peak in zip(self._optimizer.param_groups, self._peaks, strict=True) if known is group
        )

    def state_dict(self) -> dict[Tensor, float]:
        """Return the highest learning rate of every parameter.

        Returns:
            A dictionary for `load_state_dict`. Its keys are the parameters themselves, because they may be in other
            groups when it is loaded.
        """
        groups = zip(self._optimizer.param_groups, self._peaks, strict=True)
        return {p: peak for group, peak in groups for p in group["params"]}

    def load_state_dict(self, state: Mapping[Tensor, float]) -> None:
        """Restore what `state_dict` returned. Load the optimizer's state before.

        Args:
            state: The dictionary. Parameters that are not in it start with their current learning rate.
        """
        groups = self._optimizer.param_groups
        self._peaks = [max((state.get(p, 0.0) for p in group["params"]), default=0.0) for group in groups]
        self.observe()


def scaled_lr(group: dict[str, Any], factor: float = 1.0) -> float | Tensor:
    """Return the learning rate of a group times a factor, rounded to float32 where a GPU reads it from its memory.

    In a CUDA graph, fused and capturable optimizers read their learning rate from a float32 tensor. Other updates have
    to give the same weights bit for bit.
    """
    rate: float | Tensor = group["lr"] if factor == 1 else group["lr"] * factor
    capturable = group.get("fused") or group.get("capturable")
    if isinstance(rate, Tensor) or not (capturable and any(p.is_cuda for p in group["params"][:1])):
        return rate
    return float(torch.tensor(rate, dtype=torch.float32))


@contextmanager
def scaled_learning_rates(optimizer: torch.optim.Optimizer, factor: float = 1.0) -> Iterator[None]:
    """Scale the learning rates of an optimizer inside a `with` block, as `scaled_lr` does.

    Args:
        optimizer: The optimizer.
        factor: The factor for all learning rates.
    """
    original = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    try:
        for group, _ in original:
            group["lr"] = scaled_lr(group, factor)
        yield
    finally:
        for group, lr in original:
            group["lr"] = lr  # the same object, from which schedulers continue
