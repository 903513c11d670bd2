"""Detects in the first updates that a training with late gradients does not learn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from math import log
from statistics import fmean
from typing import Any

from torch import Tensor

from petra.cudagraph.async_copy import AsyncCopy
from petra.pipeline import MicrobatchResult, Stage
from petra.trainer.loss import class_dimension
from petra.trainer.stability import Steps

LOSS_LIMITS = {150: 1.0, 200: 0.95, 300: 0.9, 600: 0.9, 1200: 0.9}
"""The numbers of updates after which the loss is checked, each with a limit: a share of the loss of random guessing.

In benchmarks/guidance, the share in trainings that learn is at most 0.92 in updates 90 to 135, 0.91 in 135 to 180 and
0.79 in 180 to 225. Before update 90, it is above 1 in some of them, as in trainings that fail.
"""
_SETTLED = 300
"""The number of updates before which a loss may have grown: in fine-tuning, it may grow at the beginning."""
_EVERY = 8
"""On a GPU, one loss in this many is read, and as many losses later, so that the host does not wait for the device."""
_FIRST, _WINDOW = 8, 48
"""The numbers of losses that are averaged at the start and at each check."""


class LossWatch:
    """Checks the training loss after 150, 200, 300, 600 and 1200 updates, and reports at most one problem.

    The loss of a classifier that has not learned is the logarithm of the number of classes. If the first losses are
    about as high, the loss has to become lower than that: by 5 % after 200 updates, and by 10 % from 300 on. Otherwise,
    as in fine-tuning or for other losses, it must not have grown by 20 % from 300 on. Nothing is checked while the
    learning rate is below half of its highest value.

    Args:
        stage: The last stage.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._checks = list(LOSS_LIMITS)
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._copies: deque[AsyncCopy] = deque()
        self._guess: float | None = None
        self._seen = 0

    @property
    def finished(self) -> bool:
        """True if no check is left."""
        return not self._checks

    def observe(self, results: Sequence[MicrobatchResult]) -> str | None:
        """Record losses, and check them if it is time.

        Args:
            results: The micro-batches that have reached the loss.

        Returns:
            A description of the problem; None if there is none, or if no check is due.
        """
        for result in results:
            if not self._seen:
                self._guess = _guessing(result.outputs, result.targets)
            self._note(result.loss)
            self._seen += 1
        if not self._checks or self._stage.updates < self._checks[0]:
            return None
        share = LOSS_LIMITS[self._checks.pop(0)]
        if self._warming_up() or len(self._recent) < _FIRST:
            return None
        verdict = self._judge(fmean(self._first), fmean(self._recent), share)
        if verdict is not None:
            self._checks.clear()
        return verdict

    def _note(self, loss: Tensor) -> None:
        if not loss.is_cuda:
            self._add(float(loss))
        elif self._seen % _EVERY == 0:
            self._copies.append(AsyncCopy(loss))
            if len(self._copies) > 1:
                self._add(float(self._copies.popleft().get()))

    def _add(self, loss: float) -> None:
        if len(self._first) < _FIRST:
            self._first.append(loss)
        self._recent.append(loss)

    def _warming_up(self) -> bool:
        if self._stage.optimizer is None:
            return False
        now, peak = 0.0, 0.0
        for group in islice(self._stage.optimizer.param_groups, 1):
            now, peak = float(group["lr"]), Steps.of(self._stage.optimizer).lr
        return now < 0.5 * peak

    def _judge(self, first: float, recent: float, share: float) -> str | None:
        after = f"after {self._stage.updates} updates the training loss is {recent:.3g}"
        if self._guess is not None and first >= 0.7 * self._guess:
            if recent >= share * (min(first, self._guess) if self._stage.updates >= _SETTLED else self._guess):
                return f"{after}, and that of guessing is {self._guess:.3g}"
            return None
        grown = recent > 1.2 * first and self._stage.updates >= _SETTLED
        return f"{after}, and was {first:.3g} at the start" if grown else None


def _guessing(outputs: Any, targets: Any) -> float | None:
    """The cross-entropy of guessing; None unless the outputs are logits of classes."""
    dimension = class_dimension(outputs, targets)
    return None if dimension is None else log(outputs.shape[dimension])
