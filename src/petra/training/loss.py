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
    classes = _classes(outputs, targets)
    if classes is None:
        return None
    correct: Tensor = (outputs.argmax(dim=classes) == targets).sum()
    return correct


def count_answers(outputs: Any, targets: Any, samples: int) -> Tensor | int:
    """How many targets there are to be right about: ``samples``, or where each has a class, those not negative.

    Negative ones, like -100, are left out by cross-entropy too.
    """
    return samples if _classes(outputs, targets) is None else (targets >= 0).sum()


def _classes(outputs: Any, targets: Any) -> int | None:
    """The dimension of ``outputs`` that has two classes or more for each target, None if there is none.

    It is the last of (samples, classes) or (samples, tokens, classes), or else the second, where PyTorch has it:
    (samples, classes, tokens) or (samples, classes, height, width).
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    for dimension in {2: (1,), 3: (2, 1)}.get(outputs.ndim, (1,) if outputs.ndim > 3 else ()):
        rest = outputs.shape[:dimension] + outputs.shape[dimension + 1 :]
        if outputs.shape[dimension] > 1 and targets.shape == rest:
            return dimension
    return None
