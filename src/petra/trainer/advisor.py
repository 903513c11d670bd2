"""Warnings of a trainer about late gradients: before training from its settings, and in it from the loss."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from petra.corrections import Correction
from petra.pipeline import MicrobatchResult, Stage
from petra.schedule import PipelineSchedule
from petra.trainer.loss_watch import LossWatch
from petra.trainer.stability import (
    has_attention,
    is_transformer,
    known_steps,
    longest_delay,
    remedies,
    staleness_warning,
)


class Advisor:
    """Warns once if late gradients are likely to harm a training, and says what to change.

    Args:
        network: The network.
        stages: The stages of this process.
        schedule: The schedule.
        corrections: The corrections of staleness.
        defaults: The names of the corrections, if the trainer has chosen them because no optimizer was given.
    """

    def __init__(
        self,
        network: nn.Sequential,
        stages: Sequence[Stage],
        schedule: PipelineSchedule,
        corrections: Sequence[Correction],
        defaults: Sequence[str] = (),
    ) -> None:
        self._stages, self._schedule, self._corrections, self._defaults = stages, schedule, corrections, defaults
        self._transformer, self._attention = is_transformer(network), has_attention(network)
        last = next((stage for stage in stages if stage.last), None)
        late = not schedule.exact and longest_delay(schedule)[1] > 0
        self._watch = LossWatch(last) if late and last is not None else None

    def before_training(self) -> str | None:
        """Return what is wrong with the settings, and what to change.

        Returns:
            One sentence, or None.
        """
        optimizers = [stage.optimizer for stage in self._stages]
        return staleness_warning(optimizers, self._schedule, self._corrections, self._transformer, self._attention)

    def observe(self, results: Sequence[MicrobatchResult]) -> str | None:
        """Record losses, and check them at a few points of the training.

        Args:
            results: The micro-batches that have reached the loss.

        Returns:
            One sentence the first time that the loss shows that nothing is learned, otherwise None.
        """
        if self._watch is None:
            return None
        verdict = self._watch.observe(results)
        if verdict is not None or self._watch.finished:
            self._watch = None
        if verdict is None:
            return None
        stage, delay = longest_delay(self._schedule)
        known = known_steps([s.optimizer for s in self._stages])
        steps = max(known, key=lambda steps: steps.effective_lr)
        remedy = remedies(steps, self._schedule, self._corrections, 0.25, self._defaults)
        return (
            f"{verdict}: gradients of stage {stage} are {delay:.3g} updates late; if the network learns with exact "
            f"gradients, {remedy}"
        )

    def resumed(self) -> None:
        """Stop judging the loss: the training has begun before."""
        self._watch = None
