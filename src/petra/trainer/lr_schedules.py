"""Learning-rate schedules: the multiple of the base learning rate that every update uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi

import torch

LR_SCHEDULES = ("steps", "cosine")


@dataclass(frozen=True)
class StepLRSchedule:
    """Linear warm-up to the base learning rate, then a drop at given fractions of training."""

    epochs: float
    updates_per_epoch: float
    warmup_epochs: float = 5.0
    lr_milestones: tuple[float, ...] = (0.5, 0.75)
    factor: float = 0.1

    def __call__(self, update: int) -> float:
        """Return the multiple of the base learning rate for an update, counted from 0."""
        epoch = update / self.updates_per_epoch
        warm = min(1.0, (update + 1) / max(1.0, self.warmup_epochs * self.updates_per_epoch))
        dropped = sum(epoch >= drop * self.epochs for drop in self.lr_milestones)
        return float(warm * self.factor**dropped)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Return a scheduler for `torch.optim`, stepped once per update."""
        return _scheduler(optimizer, self)


@dataclass(frozen=True)
class CosineLRSchedule:
    """Linear warm-up to the base learning rate, then a cosine to zero at the end of training."""

    epochs: float
    updates_per_epoch: float
    warmup_epochs: float = 5.0

    def __call__(self, update: int) -> float:
        """Return the multiple of the base learning rate for an update, counted from 0."""
        warmup = max(1.0, self.warmup_epochs * self.updates_per_epoch)
        total = self.epochs * self.updates_per_epoch
        if update + 1 < warmup:
            return (update + 1) / warmup
        way = (update + 1 - warmup) / max(
            1.0, total + 1 - warmup
        )  # 1 after the last update, so that it has a rate above zero
        return 0.5 * (1 + cos(pi * min(1.0, way)))

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Return a scheduler for `torch.optim`, stepped once per update."""
        return _scheduler(optimizer, self)


def _scheduler(optimizer: torch.optim.Optimizer, curve: Callable[[int], float]) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, curve)
