"""Optimizers, learning-rate curves, and the named recipes of the papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from petra.names import unknown


def sgd(
    parameters: Sequence[nn.Parameter], *, lr: float, momentum: float = 0.9, weight_decay: float = 0.0
) -> torch.optim.SGD:
    """SGD with Nesterov momentum and no weight decay on norms and biases (Goyal et al., 2017)."""
    decayed = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr, momentum=momentum, nesterov=momentum > 0)


def base_learning_rate(batch_size: int, accumulate: int) -> float:
    """The paper's rule: 0.1 for 256 samples per update, in proportion to their number."""
    return 0.1 * batch_size * accumulate / 256


@dataclass(frozen=True)
class LearningRateCurve:
    """Warm-up to the base learning rate, then a drop at given fractions of training."""

    epochs: int
    updates_per_epoch: float
    warmup_epochs: float = 5.0
    drops: tuple[float, ...] = (0.5, 0.75)
    factor: float = 0.1

    def __call__(self, update: int) -> float:
        """The multiple of the base learning rate that update number ``update`` uses."""
        epoch = update / self.updates_per_epoch
        warm = min(1.0, (update + 1) / max(1.0, self.warmup_epochs * self.updates_per_epoch))
        dropped = sum(epoch >= drop * self.epochs for drop in self.drops)
        return float(warm * self.factor**dropped)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """A scheduler that is stepped once per update."""
        curve: Callable[[int], float] = self
        return torch.optim.lr_scheduler.LambdaLR(optimizer, curve)


@dataclass(frozen=True)
class Recipe:
    """A named set of options for `petra train`; options that are given override it."""

    name: str
    summary: str
    options: dict[str, Any] = field(default_factory=dict)


_PAPER = {"method": "petra", "order": "lock-step", "batch_size": 64, "warmup_epochs": 5.0, "stages": 10}

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "digits",
            "a small RevNet on the 8×8 digits that ship with scikit-learn: half a minute on two cores",
            {
                "model": "revnet18",
                "model_options": {"width": 16, "depths": [2, 2]},
                "data": "digits",
                "method": "petra",
                "stages": 4,
                "epochs": 15,
                "batch_size": 32,
                "lr": 0.05,
                "weight_decay": 5e-4,
                "warmup_epochs": 1.0,
                "drops": (0.6, 0.85),
            },
        ),
        Recipe(
            "petra-cifar10",
            "RevNet-18 on CIFAR-10 as in the PETRA paper: 10 stages, batch 64, k = 4, 300 epochs",
            {
                **_PAPER,
                "model": "revnet18",
                "accumulate": 4,
                "epochs": 300,
                "weight_decay": 5e-4,
                "drops": (0.5, 0.75),
            },
        ),
        Recipe(
            "petra-imagenet",
            "RevNet-18 on ImageNet (or ImageNet32 with --stem cifar) as in the PETRA paper: k = 32, 90 epochs",
            {
                **_PAPER,
                "model": "revnet18",
                "model_options": {"stem": "imagenet"},
                "accumulate": 32,
                "epochs": 90,
                "weight_decay": 1e-4,
                "drops": (1 / 3, 2 / 3, 8 / 9),
            },
        ),
    )
}


def find(name: str) -> Recipe:
    """The recipe of a name, or an error that helps."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]
