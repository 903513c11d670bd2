"""Cross-entropy and correct answers, for one class per sample or token, or for class probabilities."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from petra.reversible.streams import Streams
from petra.trainer.chunked_loss import chunked_cross_entropy

NO_CLASSES = -(2**40)
"""So many correct answers mean that the targets are no classes; sums of a few numbers with it stay negative."""
_TOLERANCE = 0.02  # of the sum of probabilities in half precision


def cross_entropy(outputs: Tensor | Streams, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy over all targets.

    Args:
        outputs: Logits, with the classes in the last dimension. Or hidden states and the weight that projects them to
            logits, as a language model with `chunked_loss` returns them; the logits are then computed for one chunk of
            tokens at a time, and never exist all at once.
        targets: The classes, in the shape of the outputs without the last dimension. Targets of -100 are ignored. Or
            floating-point class probabilities in the shape of the logits, as mixup makes them.
        label_smoothing: The weight of the uniform distribution in the targets.

    Returns:
        The loss.

    Raises:
        ValueError: If there is not one row of classes for each target.
    """
    if isinstance(outputs, tuple) and not _projects(outputs, targets):
        shapes = ", ".join(str(tuple(x.shape)) for x in outputs)
        raise ValueError(
            f"outputs of shapes {shapes} for targets of shape {tuple(targets.shape)}: the network must return logits, "
            "or hidden states for each target and the weight that projects them to logits"
        )
    if isinstance(outputs, tuple):
        hidden, weight = outputs
        return chunked_cross_entropy(hidden.flatten(0, -2), weight, targets.flatten(), label_smoothing)
    if _may_be_probabilities(outputs, targets):
        return F.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(0, -2).to(outputs.dtype), label_smoothing=label_smoothing
        )
    if targets.shape != outputs.shape[:-1]:
        raise ValueError(
            f"outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}: "
            "the network must return one row of classes for each target"
        )
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), label_smoothing=label_smoothing)


def count_correct(outputs: Any, targets: Any) -> Tensor | None:
    """Return how many outputs have their largest entry at the target; None unless the outputs are logits of classes.

    Where targets are class probabilities, the target is the most probable class. If floating-point targets in the shape
    of the outputs turn out to be no probabilities, the number is negative; reading them here would make the host wait.
    """
    if _may_be_probabilities(outputs, targets):
        correct: Tensor = (outputs.argmax(-1) == targets.argmax(-1)).sum()
        each = (targets.sum(-1) - 1).abs() < _TOLERANCE
        return correct.where((targets >= 0).all() & each.all(), NO_CLASSES)
    classes = class_dimension(outputs, targets)
    if classes is None:
        return None
    answers: Tensor = outputs.argmax(dim=classes) == targets
    return answers.sum()


def count_answers(outputs: Any, targets: Any, samples: int) -> Tensor | int:
    """Return the number of targets: ``samples``, or for classes the number of targets that are not negative.

    Cross-entropy ignores negative targets, such as -100, too.
    """
    classifies = class_dimension(outputs, targets) is not None or _projects(outputs, targets)
    return (targets >= 0).sum() if classifies else samples


def _may_be_probabilities(outputs: Any, targets: Any) -> bool:
    """Return whether targets are floating-point numbers in the shape of two or more logits."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor) and targets.is_floating_point()):
        return False
    return targets.ndim > 1 and targets.shape == outputs.shape and targets.shape[-1] > 1


def _projects(outputs: Any, targets: Any) -> bool:
    """Return whether ``outputs`` are hidden states for each target and the weight that projects them to logits."""
    if not (isinstance(outputs, tuple) and len(outputs) == 2 and isinstance(targets, Tensor)):
        return False
    hidden, weight = outputs
    fits = hidden.shape[:-1] == targets.shape and weight.shape[1:] == hidden.shape[-1:]
    return bool(weight.ndim == 2 and fits and not targets.is_floating_point())


def class_dimension(outputs: Any, targets: Any) -> int | None:
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
