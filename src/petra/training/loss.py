"""Cross-entropy and right answers, for one class a sample and for one class a token."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F


def cross_entropy(outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean over all targets, each of which has its classes in the last dimension of ``outputs``."""
    if targets.shape != outputs.shape[:-1]:
        raise ValueError(
            f"outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}: "
            "a network gives one row of classes for each target"
        )
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), label_smoothing=label_smoothing)


def count_correct(outputs: Any, targets: Any) -> Tensor | None:
    """How many outputs have their largest entry at the target; None unless these are classes."""
    if not _classify(outputs, targets):
        return None
    correct: Tensor = (outputs.argmax(dim=-1) == targets).sum()
    return correct


def count_answers(outputs: Any, targets: Any, samples: int) -> Tensor | int:
    """How many targets there are to be right about: ``samples``, or where each has a class, those not negative.

    Negative ones, like -100, are left out by cross-entropy too.
    """
    return (targets >= 0).sum() if _classify(outputs, targets) else samples


def _classify(outputs: Any, targets: Any) -> bool:
    """Whether there is a row of classes for each target: (samples, classes) or (samples, tokens, classes)."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.ndim not in (2, 3):
        return False
    return bool(targets.shape == outputs.shape[:-1] and not targets.is_floating_point())
