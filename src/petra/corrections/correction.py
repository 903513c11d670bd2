"""The interface of a correction: what it may change in the forward, the backward and the update of one stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Weights = list[Tensor]
"""A value for each parameter of a stage, in the order of the parameters."""


@dataclass
class StageContext:
    """One stage as corrections see it, with the state that they keep between updates."""

    parameters: Sequence[nn.Parameter]
    """All parameters of the stage."""
    optimizer: torch.optim.Optimizer
    """The optimizer of the stage."""
    staleness: float
    """τ: updates between a forward and its backward, averaged over the micro-batches of a full pipeline.

    0 while the pipeline is flushed after every update.
    """
    accumulate: int = 1
    """k: micro-batches per update."""
    updates: int = 0
    """The number of updates so far."""
    lr_factor: float = 1.0
    """The factor for the learning rate of the next update."""
    peak_lr: float = 0.0
    """The highest learning rate so far."""
    lr_ratio: float = 1.0
    """ρ: the learning rate of the next update divided by `peak_lr`, rounded to a power of two."""
    momentum_horizon: float = 0.0
    """A lower limit for the number of updates that momentum averages over, 1/(1 - m)."""
    state: dict[Tensor, dict[str, Tensor]] = field(default_factory=dict)
    """The state of each parameter, as in an optimizer."""

    def trained_parameters(self) -> list[tuple[nn.Parameter, dict[str, Any]]]:
        """Return the parameters that the optimizer updates.

        Returns:
            Each parameter with its group of the optimizer.
        """
        return [(p, group) for group in self.optimizer.param_groups for p in group["params"]]

    def main_group(self) -> dict[str, Any]:
        """Return the first group of the optimizer that has parameters.

        Checkpoints do not contain the settings of groups without parameters.

        Returns:
            The group; the very first one if none has parameters.
        """
        groups = self.optimizer.param_groups
        return next((group for group in groups if group["params"]), groups[0])

    def momentum(self, group: dict[str, Any]) -> float:
        """Return the momentum that the next update of a group of SGD uses.

        Args:
            group: The group.

        Returns:
            The group's momentum, or more if a correction asks for it.
        """
        m = float(group["momentum"])
        return max(m, 1 - 1 / self.momentum_horizon) if self.momentum_horizon > 1 else m


class Correction:
    """A way to compensate for staleness.

    A correction holds only its parameter. Its state is in the `StageContext`. Corrections are applied to stages with
    τ > 0; the others need none. A `delay` is the number of updates between the forward and the backward of one
    micro-batch, and at least 1.
    """

    name: ClassVar[str]
    """The name that `--corrections` takes."""
    summary: ClassVar[str]
    """One line for `petra corrections`."""
    example: ClassVar[str]
    """An example for `--corrections`, with a parameter if the correction takes one."""
    experimental: ClassVar[bool] = False
    """True if the project's measurements do not show a benefit."""
    changes_backward_weights: ClassVar[bool] = False
    """True if it changes the weights of the backward, which then cannot be those of the forward."""
    needs_old_weights: ClassVar[bool] = False
    """True if `change_step` or `after_step` needs the weights before the update."""
    replaces_step: ClassVar[bool] = False
    """True if `change_step` replaces the optimizer's step and needs only its momentum buffer."""

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `ValueError` if the correction cannot be used with an optimizer.

        Args:
            optimizer: The optimizer of a stage.
        """

    def forward_weights(self, context: StageContext, delay: int) -> Weights | None:
        """Return the weights for a forward.

        Args:
            context: The stage.
            delay: The number of updates until the backward of the micro-batch.

        Returns:
            A value for each parameter, or None for the current weights.
        """
        return None

    def backward_weights(self, context: StageContext, delay: int) -> Weights | None:
        """Return the weights for a backward.

        Args:
            context: The stage.
            delay: The number of updates since the forward of the micro-batch.

        Returns:
            A value for each parameter, or None for the current weights.
        """
        return None

    def momentum_horizon(self, context: StageContext) -> float:
        """Return a lower limit for the number of updates that momentum averages over, 1/(1 - m).

        Args:
            context: The stage.

        Returns:
            The number of updates; 0 for no limit.
        """
        return 0.0

    def lr_factor(self, context: StageContext) -> float:
        """Return the factor for the learning rate of the next update.

        Args:
            context: The stage.

        Returns:
            The factor.
        """
        return 1.0

    def change_gradients(self, context: StageContext) -> None:
        """Change gradients in place before an update, and before they are clipped.

        Args:
            context: The stage.
        """

    def change_step(self, context: StageContext, old: Weights) -> None:
        """Change the weights right after the optimizer's step.

        Args:
            context: The stage.
            old: The weights of `context.trained_parameters()` before the step, if `needs_old_weights`.
        """

    def after_step(self, context: StageContext, old: Weights) -> None:
        """Update the state of the correction, after all corrections have changed the step.

        Args:
            context: The stage.
            old: The weights of `context.trained_parameters()` before the step, if `needs_old_weights`.
        """

    def __str__(self) -> str:
        given: list[Any] = [(f.type, getattr(self, f.name)) for f in fields(self)] if is_dataclass(self) else []
        # 1 and 1.0 are the same parameter and must look the same in a checkpoint.
        return ":".join([self.name, *(str(v if kind == "int" else float(v)) for kind, v in given if v is not None)])
