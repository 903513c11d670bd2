"""Cross-entropy and correct answers, for one class per sample or one class per token."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F


def cross_entropy(outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy over all targets; classes are the last dimension of ``outputs``."""
    if targets.shape != outputs.shape[:-1]:
        raise ValueError(
            f"outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}: "
            "the network must return one row of classes for each target"
        )
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), label_smoothing=label_smoothing)


def count_correct(outputs: Any, targets: Any) -> Tensor | None:
    """Return how many outputs have their largest entry at the target; None unless the targets are classes."""
    classes = _classes(outputs, targets)
    if classes is None:
        return None
    correct: Tensor = (outputs.argmax(dim=classes) == targets).sum()
    return correct


def count_answers(outputs: Any, targets: Any, samples: int) -> Tensor | int:
    """Return the number of targets: ``samples``, or for classes the number of targets that are not negative.

    Cross-entropy ignores negative targets, such as -100, too.
    """
    return samples if _classes(outputs, targets) is None else (targets >= 0).sum()


def _classes(outputs: Any, targets: Any) -> int | None:
    """Return the dimension of ``outputs`` that has two or more classes for each target; None if there is none.

    It is the last one of (samples, classes) or (samples, tokens, classes), or else the second one, as in PyTorch:
    (samples, classes, tokens) or (samples, classes, height, width).
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    for dimension in {2: (1,), 3: (2, 1)}.get(outputs.ndim, (1,) if outputs.ndim > 3 else ()):
        rest = outputs.shape[:dimension] + outputs.shape[dimension + 1 :]
        if outputs.shape[dimension] > 1 and targets.shape == rest:
            return dimension
    return None
