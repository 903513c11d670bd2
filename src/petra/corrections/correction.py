"""What a correction is: what it may change about the forward, the backward and the update of one stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Weights = list[Tensor]
"""A value for each parameter of a stage, in their order."""


@dataclass
class Site:
    """One stage, as far as corrections know it; what they keep between updates is here."""

    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    staleness: float
    """τ: updates between a forward and its backward, in the mean over the micro-batches of a full pipeline."""
    accumulate: int = 1
    """k: micro-batches to an update."""
    updates: int = 0
    """How many there have been."""
    rate: float = 1.0
    """What the learning rate of the next update is multiplied by."""
    highest: float = 0.0
    """The highest learning rate that there has been."""
    fall: float = 1.0
    """ρ: the learning rate of the next update over the highest, as a power of two, the nearest by its exponent."""
    memory: float = 0.0
    """How many updates momentum has to remember, 1/(1 - m), if its own are fewer."""
    state: dict[Tensor, dict[str, Tensor]] = field(default_factory=dict)
    """Of each parameter, like the state of an optimizer."""

    def groups(self) -> list[tuple[nn.Parameter, dict[str, Any]]]:
        """The parameters that are trained, each with the settings of its group."""
        return [(p, group) for group in self.optimizer.param_groups for p in group["params"]]

    def group(self) -> dict[str, Any]:
        """The first group with parameters: settings of one without are in no checkpoint."""
        groups = self.optimizer.param_groups
        return next((group for group in groups if group["params"]), groups[0])

    def momentum(self, group: dict[str, Any]) -> float:
        """That of the updates of a group of SGD."""
        m = float(group["momentum"])
        return max(m, 1 - 1 / self.memory) if self.memory > 1 else m


class Correction:
    """A way to make up for staleness. Holds its parameter and nothing else: the state is in the `Site`.

    Sites are of stages with τ > 0; the others need no correction. A ``delay`` is the number of updates between
    forward and backward of one micro-batch, never 0.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    example: ClassVar[str]
    """How it is asked for, with a parameter if it has one."""
    moves_backward: ClassVar[bool] = False
    """Whether the backward gets other weights, so that it cannot have those of its forward."""
    needs_old: ClassVar[bool] = False
    """Whether it wants to see the weights of before an update."""
    replaces_step: ClassVar[bool] = False
    """Whether its own step takes the place of the optimizer's, of which it needs momentum alone."""

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError for an optimizer that it cannot be used with."""

    def forward_weights(self, site: Site, delay: int) -> Weights | None:
        """The weights of a forward whose backward will come ``delay`` updates later; None for the current ones."""
        return None

    def backward_weights(self, site: Site, delay: int) -> Weights | None:
        """The weights of a backward whose forward was ``delay`` updates ago; None for the current ones."""
        return None

    def memory(self, site: Site) -> float:
        """How many updates momentum has to remember."""
        return 0.0

    def rate(self, site: Site) -> float:
        """What the learning rate of the next update is multiplied by."""
        return 1.0

    def change_gradients(self, site: Site) -> None:
        """Before an update, and before gradients are clipped."""

    def change_step(self, site: Site, old: Weights) -> None:
        """After the optimizer's step from the weights ``old`` of all that is trained: put others in its place."""

    def see_step(self, site: Site, old: Weights) -> None:
        """After all others have changed the step."""

    def __str__(self) -> str:
        given: list[Any] = [(f.type, getattr(self, f.name)) for f in fields(self)] if is_dataclass(self) else []
        # 1 and 1.0 are the same parameter, and have to look the same in a checkpoint.
        return ":".join([self.name, *(str(v if kind == "int" else float(v)) for kind, v in given if v is not None)])
