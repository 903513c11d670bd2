"""The optimizer, learning rates and corrections of a trainer that is given no optimizer."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from math import ceil, sqrt

import torch
from torch import Tensor, nn

from petra.methods import Method
from petra.optim import hidden_matrices
from petra.schedule import PipelineSchedule
from petra.trainer import optimizers
from petra.trainer.stability import is_transformer, longest_delay

INERTIA = 4.0
"""The factor of the correction `inertia`, measured in experiments/cifar10 and benchmarks/guidance."""
MIN_WARMUP, MAX_WARMUP = 200, 2000


@dataclass(frozen=True)
class WarmupAndDecay:
    """Linear warm-up over some updates, then a decay with the square root of the number of updates.

    The curve does not depend on the length of the training.
    """

    warmup: int

    def __call__(self, update: int) -> float:
        """Return the multiple of the base learning rate for an update, counted from 0."""
        step = (update + 1) / self.warmup
        return min(step, 1 / sqrt(step))


@dataclass(frozen=True)
class TrainingDefaults:
    """The settings that a trainer chooses if it is given no optimizer.

    A scheduler and corrections that are given replace those of the defaults. `trainer.defaults` has the settings.
    Transformers get Muon, all other networks SGD.
    """

    optimizer: str
    """`sgd` (with Nesterov momentum) or `muon`."""
    lr: float
    """The learning rate after the warm-up."""
    momentum: float
    """The momentum."""
    weight_decay: float
    """The weight decay of parameters with two or more dimensions."""
    warmup: int
    """Updates of linear warm-up; then, update u has the learning rate lr·√(warmup/u)."""
    corrections: tuple[str, ...]
    """The corrections of staleness."""
    hidden: Container[Tensor] = field(repr=False, compare=False)
    """The matrices that Muon orthogonalises."""

    @classmethod
    def choose(cls, network: nn.Sequential, method: Method, schedule: PipelineSchedule) -> TrainingDefaults:
        """Choose the defaults for a network and a schedule.

        Args:
            network: The network.
            method: The training method.
            schedule: The schedule, with its number of stages and of micro-batches per update.

        Returns:
            The defaults.
        """
        delay = longest_delay(schedule)[1] if method.stale else 0.0
        hidden = hidden_matrices(network)
        if is_transformer(network):
            lr = 2e-3 if delay <= 1 else 1e-3
            return cls("muon", lr, 0.95, 0.1, MIN_WARMUP, (), hidden)
        # The number of updates over which the momentum of the first stage averages.
        memory = ceil(INERTIA * schedule.accumulate * delay**2)
        corrections = ("predict", f"inertia:{INERTIA:g}") if delay else ()
        return cls("sgd", 0.025, 0.9, 5e-4, min(max(memory, MIN_WARMUP), MAX_WARMUP), corrections, hidden)

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of a stage.

        Args:
            parameters: The parameters of the stage that are trained.

        Returns:
            The optimizer.
        """
        lr, m, decay = self.lr, self.momentum, self.weight_decay
        if self.optimizer == "muon":
            return optimizers.muon(parameters, hidden=self.hidden, lr=lr, momentum=m, weight_decay=decay)
        return optimizers.sgd(parameters, lr=lr, momentum=m, weight_decay=decay)

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Return the learning-rate scheduler of an optimizer, stepped once per update.

        Args:
            optimizer: The optimizer of a stage.

        Returns:
            The scheduler.
        """
        return torch.optim.lr_scheduler.LambdaLR(optimizer, WarmupAndDecay(self.warmup))

    def __str__(self) -> str:
        name = "SGD with Nesterov momentum" if self.optimizer == "sgd" else "Muon with momentum"
        corrections = f"; corrections {', '.join(self.corrections)}" if self.corrections else ""
        return (
            f"{name} {self.momentum:g}, learning rate {self.lr:g} after {self.warmup} updates of warm-up, then "
            f"falling with the square root of the updates, weight decay {self.weight_decay:g}{corrections}"
        )
