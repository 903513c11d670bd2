"""The training loop: epochs or steps, evaluation, metrics, checkpoints, the best weights and the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from petra.data import batch_count, batch_samples, batch_weight
from petra.distributed import RecentMaximum, Snapshots
from petra.pipeline import MicrobatchResult
from petra.pipeline.stage import Loss
from petra.trainer.best_weights import BestWeights, Monitor
from petra.trainer.callbacks import Callback
from petra.trainer.checkpoint_folder import Checkpoints, check_finite
from petra.trainer.evaluation import Evaluation
from petra.trainer.interrupts import Interrupted, stop_on_signal
from petra.trainer.metrics import MetricsLog, MetricsState
from petra.trainer.progress import RunProgress, ThroughputTimer
from petra.trainer.progress_bar import ProgressBar
from petra.trainer.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """When a training ends, and when it evaluates, logs and writes checkpoints.

    A *step* is the share of an update: `accumulate` micro-batches.
    """

    epochs: int | None = None
    """The number of epochs; None for no limit."""
    max_steps: int | None = None
    """The number of steps; None for no limit. The limit that is reached first ends the training."""
    eval_every: int | None = None
    """The steps between evaluations; None evaluates after every epoch. The end of training is always evaluated."""
    log_every: int | None = None
    """The steps between records of training loss and speed; None writes records of evaluations only."""
    checkpoint_every: int = 0
    """The micro-batches between checkpoints within an epoch; 0 for none."""
    checkpoint_epochs: int = 1
    """The epochs between checkpoints."""
    keep: int = 1
    """The number of complete checkpoints to keep."""
    patience: int | None = None
    """The number of evaluations without an improvement after which training ends; None never ends it early."""
    min_delta: float = 0.0
    """The smallest change that counts as an improvement."""
    monitor: str | None = None
    """The metric of the best weights and of `patience`: `"accuracy"` or `"loss"`; None chooses."""
    save_best: bool = True
    """Write the weights of the best evaluation."""


class TrainingLoop:
    """Trains a trainer to the end: reads micro-batches, evaluates, logs, saves, and drains the pipeline.

    Args:
        trainer: The trainer.
        train: The training data.
        test: Returns the batches of an evaluation; None evaluates nothing.
        settings: When to end, evaluate, log and save.
        checkpoints: Where checkpoints are written; None writes none.
        folder: The folder of metrics and best weights; None writes none.
        callbacks: Called at the events of the training.
        progress: The progress of the training so far.
        metrics: The metrics file at the checkpoint.
        test_loss: The loss of evaluations, if it is not that of training.
        quiet: Print no progress.
        resume_hint: What to do after an interruption, for the message.
        snapshots: The snapshots of this process, if the job replaces lost processes.
        checkpoint_best_step: The step of the best weights in the last checkpoint, if the progress is newer than that.
    """

    on_start: ClassVar[list[Callable[[Any], None]]] = []
    """Functions that are called when any training starts or continues; tests inject faults with them."""

    def __init__(
        self,
        trainer: Trainer,
        train: Any,
        test: Callable[[], Iterable[Any]] | None,
        settings: LoopSettings,
        *,
        checkpoints: Checkpoints | None = None,
        folder: Path | None = None,
        callbacks: Sequence[Callback] = (),
        progress: RunProgress | None = None,
        metrics: MetricsState | None = None,
        test_loss: Loss | None = None,
        quiet: bool = False,
        resume_hint: str = "continue from the last checkpoint",
        snapshots: Snapshots | None = None,
        checkpoint_best_step: int | None = None,
    ) -> None:
        self.trainer, self.train, self.settings = trainer, train, settings
        self.transport, self.device = trainer.transport, trainer.device
        self.progress = progress if progress is not None else RunProgress()
        """Position, sums and results so far."""
        self.callbacks = list(callbacks)
        self._test, self._test_loss = test, test_loss
        self._checkpoints, self._snapshots = checkpoints, snapshots
        self._recent = RecentMaximum(self.transport)
        self._resume_hint = resume_hint
        self._stopping = False
        self._steps_per_update = int(trainer.layout["accumulate"])
        self._monitor = Monitor(settings.monitor, settings.min_delta)
        self._best = BestWeights(folder if settings.save_best else None, trainer)
        best_problem = self._best.recover(self.progress, checkpoint_best_step)
        self._timer = ThroughputTimer(self.progress, self.device)
        self.records: list[dict[str, Any]] = []
        """The records of metrics of this process, the oldest first; none from before a checkpoint."""
        metrics_file = folder / "metrics.jsonl" if folder and self.is_main else None
        self.metrics = MetricsLog(metrics_file, **vars(metrics or MetricsState()))
        self.folder = folder
        """The folder of the training; None writes no files."""
        title, epochs, steps = trainer.method.name, settings.epochs, settings.max_steps
        self.progress_bar = ProgressBar(title, epochs, batch_count(train), quiet or not self.is_main, steps)
        for problem in (self.metrics.problem, best_problem):
            if problem is not None:
                self.progress_bar.warn(problem)

    @property
    def is_main(self) -> bool:
        """True in the process that writes files and messages."""
        return self.transport.position.is_main

    @property
    def step(self) -> int:
        """The number of steps so far; at the end of training, the number of updates of each stage."""
        steps, rest = divmod(self.progress.microbatches, self._steps_per_update)
        return steps + (rest > 0 and self._drained)

    @property
    def epoch(self) -> float:
        """The epochs so far; only whole epochs if their length is unknown."""
        epoch, batch, length = self.progress.epoch, self.progress.batch, batch_count(self.train)
        return epoch if batch == 0 or length is None else round(epoch + batch / length, 4)

    def describe(self) -> dict[str, Any]:
        """Return the settings of the training, for loggers.

        Returns:
            Plain values by name.
        """
        return dict(self.trainer.layout)

    def stop(self) -> None:
        """End the training after this step: drain, evaluate and save. All ranks must call it in the same step."""
        self._stopping = True

    def run(self) -> None:
        """Train to the end.

        Raises:
            Interrupted: If the process was asked to stop; a checkpoint has been written, if there is a folder.
            Diverged: If the loss or a weight is not finite.
        """
        with stop_on_signal() as stop:  # to the very end: a signal after the last epoch does not stop the rest
            try:
                self._start()
                while not self._ended:
                    self._epoch(stop)
                self._finish()
                self._call("on_end")
            except BaseException:
                if self._checkpoints is not None and self._checkpoints.abandon():
                    self._best.commit()
                self._call("on_end")
                raise
            finally:
                self.close()

    def close(self) -> None:
        """Wait for the checkpoint in progress, and close the progress bar and the files. All ranks call it together."""
        self._finish_save()
        self.progress_bar.close()
        self.metrics.close()

    @property
    def _drained(self) -> bool:
        return not self.trainer.executor.in_flight

    @property
    def _ended(self) -> bool:
        epochs = self.settings.epochs
        reached = epochs is not None and self.progress.epoch >= epochs
        return reached or self.progress.stopped_early or (self._reached_max_steps and self._drained)

    @property
    def _reached_max_steps(self) -> bool:
        steps = self.settings.max_steps
        return steps is not None and self.progress.microbatches >= steps * self._steps_per_update

    def _start(self) -> None:
        for function in self.on_start:
            function(self)
        self._call("on_start")

    def _call(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)

    def _epoch(self, stop: threading.Event) -> None:
        """Train to the end of the epoch, or of the training."""
        progress, timer = self.progress, self._timer
        self.progress_bar.start(progress.epoch, progress.batch)
        timer.start()
        exhausted = True
        for x, y in () if self._reached_max_steps else self.train.epoch(progress.epoch, progress.batch):
            progress.count(self._tick(x, y, batch_weight(self.train, progress.batch)))
            progress.trained += batch_samples(self.train, progress.batch, x)
            progress.batch += 1
            progress.microbatches += 1
            self._after_tick()
            interrupted = self._exchange(stop.is_set())
            self.progress_bar.step(self._figures)
            last = progress.batch == batch_count(self.train)
            if progress.microbatches % self._steps_per_update == 0:
                self._after_step(last)
            if self._snapshots is not None and not (self._stopping or self._reached_max_steps):
                self._snapshots.after_tick(progress.microbatches, self._snapshot)
            every = self.settings.checkpoint_every
            if interrupted or (not last and every and progress.microbatches % every == 0):
                timer.stop()
                self._save(wait=interrupted)
                timer.start()
            if interrupted:
                self._before_end()
                raise Interrupted(f"stopped in epoch {progress.epoch + 1}; {self._resume_hint}")
            if self._stopping or self._reached_max_steps:
                exhausted = last
                break
        if exhausted and progress.batch == 0:
            raise ValueError(
                f"the training data has no batches in epoch {progress.epoch + 1}: give a list or a loader that can be "
                "iterated over many times, not a generator"
            )
        ending = self._stopping or self._reached_max_steps or progress.epoch + 1 == self.settings.epochs
        if ending:
            self._drain()
        timer.stop()
        if exhausted:
            progress.epoch, progress.batch = progress.epoch + 1, 0
        self.progress_bar.close()
        if (ending and progress.evaluated_at < progress.microbatches) or self.settings.eval_every is None:
            self._evaluate()
        if self._stopping and not ending:  # early stopping: finish what is in flight, and evaluate that
            ending = True
            self._drain()
            if progress.evaluated_at < progress.microbatches:
                self._evaluate()
        if ending:
            progress.stopped_early = self._stopping
        epochs = self.settings.checkpoint_epochs
        if ending or (exhausted and progress.epoch % epochs == 0):
            self._save(wait=ending)

    def _drain(self) -> None:
        """Finish the micro-batches in flight."""
        progress = self.progress
        if not (self.trainer.schedule.exact and progress.microbatches % self._steps_per_update == 0):
            progress.evaluated_at = -1  # weights will change
        progress.count(self.trainer.drain())
        self._before_end()

    def _figures(self) -> tuple[float, int, int, float]:
        self.progress.read()
        self._timer.lap()
        return self.progress.loss, self.progress.correct, self.progress.samples, self.progress.rate

    def _tick(self, x: Any, y: Any, weight: float) -> list[MicrobatchResult]:
        """Train one micro-batch."""
        return self.trainer.step(x, y, weight)

    def _exchange(self, stop: bool) -> bool:
        """Tell all ranks about this one; return whether one of them has to stop. All learn it in the same tick."""
        own = [] if self._checkpoints is None else self._checkpoints.report()
        found = self._recent.update([stop, *own])
        if found is None:
            return False
        if self._checkpoints is not None and self._checkpoints.advance(found[1:]):
            self._saved()
        return bool(found[0])

    def _after_tick(self) -> None:
        """Do what follows every micro-batch."""

    def _before_end(self) -> None:
        """Do what follows the last micro-batch."""

    def _after_step(self, last: bool) -> None:
        """Log, evaluate and call callbacks after the last micro-batch of an update."""
        self._call("on_update")
        every, log_every = self.settings.eval_every, self.settings.log_every
        ends = self._stopping or self._reached_max_steps or (last and self.progress.epoch + 1 == self.settings.epochs)
        evaluates = ends or (last if every is None else self.step % every == 0)
        if log_every and self.step % log_every == 0 and not evaluates:  # an evaluation writes a record anyway
            self._timer.lap()
            self._log({}, reset=False)
        if every and evaluates and not ends:
            self._timer.stop()
            self._evaluate(within=True)
            self._timer.start()

    def _evaluate(self, within: bool = False) -> None:
        """Evaluate the test data, and write the record; `within` an epoch."""
        progress, found = self.progress, {}
        if self._test is not None:
            evaluation = self.trainer.evaluate(self._test(), self._test_loss)
            progress.test_loss, progress.test_accuracy = evaluation.loss, evaluation.accuracy
            found = {"test_loss": evaluation.loss, "test_accuracy": evaluation.accuracy} | self._more(evaluation)
            if self.trainer.ema is not None:
                averaged = self.trainer.evaluate(self._test(), self._test_loss, average=True)
                found |= {"ema_test_loss": averaged.loss, "ema_test_accuracy": averaged.accuracy}
                progress.ema_test_loss, progress.ema_test_accuracy = averaged.loss, averaged.accuracy
            self._call("on_evaluate", evaluation)
        record = self._log(found, reset=True)
        if within:
            self.progress_bar.report(record)
        else:
            self.progress_bar.end(record)
        progress.evaluated_at = progress.microbatches
        if self._monitor.update(progress, record, self.step, self.epoch):
            progress.best_sha256 = self._best.write(self.step)
        if self.settings.patience is not None and progress.stale_evaluations >= self.settings.patience:
            self._stopping = True

    def _more(self, evaluation: Evaluation) -> dict[str, Any]:
        """Return further metrics of an evaluation."""
        return {}

    def _log(self, found: dict[str, Any], reset: bool) -> dict[str, Any]:
        """Write a record with the training metrics since the last one, and those that were ``found``."""
        progress = self.progress
        sums = self._sums()
        loss, correct, samples = sums if reset else [s - b for s, b in zip(sums, progress.logged, strict=True)]
        classifies = sums[1] >= 0 and samples
        record = {
            "step": self.step,
            "microbatches": progress.microbatches,
            "epoch": self.epoch,
            "train_loss": loss / samples if samples else None,
            "train_accuracy": correct / samples if classifies else None,
            **{name: value for name, value in found.items() if name != "bits_per_byte"},
            "lr": self._learning_rate(),
            "samples_per_second": progress.rate,
            "seconds": progress.seconds,
            **{name: value for name, value in found.items() if name == "bits_per_byte"},
        }
        progress.logged = list(sums)
        if reset:
            progress.reset_sums()
        self.records.append(record)
        self.metrics.write(record, evaluation=reset)
        self._call("on_log", record)
        return record

    def _learning_rate(self) -> float:
        optimizer = self.trainer.stages[-1].optimizer
        return float(optimizer.param_groups[0]["lr"]) if optimizer is not None else 0.0

    def _finish(self) -> None:
        """Do what follows the end of training, once."""
        if not self.progress.finished:
            self.progress.finished = True
            self._save()

    def _save(self, wait: bool = True) -> None:
        """Write a checkpoint: wait until it is complete, or only until the state has been copied."""
        if self._checkpoints is None:
            check_finite(self.trainer.network.state_dict().items(), self.trainer.executor.microbatches)
            return
        self._finish_save()  # one at a time
        self.transport.activity.now("starting a checkpoint")
        progress = self.progress
        if self.transport.position.replicas > 1:
            loss, correct, samples = self._sums()
            progress = replace(progress, loss=loss, correct=int(correct), samples=int(samples))
        else:  # the main rank has all sums, and does not wait for the others
            progress.read()
        state = self._state(progress)
        self._best.start_checkpoint()
        self._checkpoints.start(state["run"], state["stages"], self.trainer.executor.microbatches)
        if wait:
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait for the checkpoint in progress."""
        if self._checkpoints is not None and self._checkpoints.finish():
            self._saved()

    def _saved(self) -> None:
        """Do what follows a complete checkpoint."""
        self._best.commit()
        self._call("on_checkpoint")

    def _snapshot(self) -> dict[str, Any]:
        """Return the state of this process, with the sums of this process."""
        self._timer.lap()
        self.progress.read()
        return self._state(self.progress)

    def _state(self, progress: RunProgress) -> dict[str, Any]:
        """Return the state of the run, and those of the stages of this process."""
        state = self.trainer.state_dict()
        run = {
            "layout": state["layout"],
            "executor": state["executor"],
            "placement": self.trainer.placement,
            "progress": asdict(progress),
            "metrics": asdict(self.metrics.state),
            **self._identity(),
        }
        return {"run": run, "stages": state["stages"]}

    def _identity(self) -> dict[str, Any]:
        """Return the rest of a checkpoint."""
        return {}

    def _sums(self) -> list[float]:
        """The loss, correct answers (negative if unknown) and samples since the last evaluation, over all replicas."""
        progress = self.progress
        progress.read()
        return self.transport.total([progress.loss, progress.correct, progress.samples])
