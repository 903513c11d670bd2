"""Callbacks: your own code at the events of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from petra.trainer.evaluation import Evaluation
    from petra.trainer.loop import TrainingLoop


class Callback:
    """Base class of callbacks. Override the events that you need; all of them do nothing here.

    All ranks call the same events at the same time, so a callback may use collective methods of the trainer such as
    `evaluate` and `weights`. What must happen once, such as writing a file, belongs under `if loop.is_main`.

    Example:
        ```python
        class PrintLoss(petra.Callback):
            def on_log(self, loop, record):
                if loop.is_main:
                    print(record["step"], record.get("train_loss"))
        ```
    """

    def on_start(self, loop: TrainingLoop) -> None:
        """Training starts or continues.

        Args:
            loop: The training; `loop.trainer` is its trainer, `loop.step` the number of updates so far.
        """

    def on_update(self, loop: TrainingLoop) -> None:
        """A step is complete: `accumulate` more micro-batches have been read.

        In an asynchronous pipeline, other stages update at other times. So these micro-batches have not reached all of
        them yet.

        Args:
            loop: The training. `loop.stop()` ends it after this step; all ranks must call it in the same step.
        """

    def on_evaluate(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        """The test data has been evaluated.

        Args:
            loop: The training.
            evaluation: Loss and accuracy, the same on all ranks.
        """

    def on_log(self, loop: TrainingLoop, record: dict[str, Any]) -> None:
        """A record of metrics is complete: after an evaluation, and every `log_every` steps.

        Args:
            loop: The training.
            record: The line of `metrics.jsonl`.
        """

    def on_checkpoint(self, loop: TrainingLoop) -> None:
        """A checkpoint is complete; it may have been started some steps before.

        Args:
            loop: The training; `loop.folder` is its folder.
        """

    def on_end(self, loop: TrainingLoop) -> None:
        """Training has ended: it is complete, was interrupted, or failed.

        Args:
            loop: The training; `loop.progress.finished` is True if it is complete.
        """
