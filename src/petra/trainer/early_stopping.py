"""Early stopping: when a training no longer improves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EarlyStopping:
    """Ends a training when the monitored metric stops improving.

    The argument `monitor` of `Trainer.fit` names the metric. By default, this is the accuracy on the test data where it
    is known, otherwise the loss.
    """

    patience: int = 5
    """The number of evaluations in a row without an improvement."""
    min_delta: float = 0.0
    """The smallest change that counts as an improvement."""
