"""`Trainer.fit`: the training loop for your own network and data."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from petra.data import BatchSource, batch_count
from petra.distributed import LostRank
from petra.trainer.best_weights import AVERAGE, forget_newer
from petra.trainer.callbacks import Callback
from petra.trainer.checkpoint import export_weights, write_json
from petra.trainer.checkpoint_folder import Checkpoints
from petra.trainer.defaults import WarmupAndDecay
from petra.trainer.loop import LoopSettings, TrainingLoop
from petra.trainer.metrics import MetricsState, parse_records
from petra.trainer.progress import RunProgress
from petra.trainer.sources import LoaderSource, as_source

if TYPE_CHECKING:
    from petra.trainer.trainer import Trainer

CHECKPOINTS, METRICS, SUMMARY, WEIGHTS = "checkpoint", "metrics.jsonl", "summary.json", "weights.safetensors"


@dataclass(frozen=True)
class FitResult:
    """The result of `Trainer.fit`."""

    steps: int
    """The number of updates."""
    epochs: float
    """The passes over the training data."""
    train_loss: float | None
    """The mean training loss since the evaluation before the last."""
    test_loss: float | None
    """The loss on the test data at the end; None without test data."""
    test_accuracy: float | None
    """The accuracy on the test data at the end; None if it is unknown."""
    ema_test_loss: float | None
    """The loss of the averaged weights on the test data; None without `ema`."""
    ema_test_accuracy: float | None
    """The accuracy of the averaged weights."""
    best: float | None
    """The best value of the monitored metric."""
    best_step: int
    """The step at which it was reached."""
    stopped_early: bool
    """True if early stopping or a callback ended the training."""
    records: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """The records of metrics, the oldest first; with `out`, also those from before a checkpoint, on the main rank."""


class Fit(TrainingLoop):
    """The training loop of `Trainer.fit`."""

    def __init__(
        self,
        trainer: Trainer,
        train: BatchSource,
        test: Iterable[Any] | BatchSource | None,
        settings: LoopSettings,
        *,
        out: Path | None,
        resume: bool,
        from_checkpoint: int | None,
        callbacks: Sequence[Callback],
        quiet: bool,
    ) -> None:
        progress, metrics = RunProgress(), None
        checkpoints = None
        if out is not None:
            checkpoints = Checkpoints(out / CHECKPOINTS, trainer.transport, keep=settings.keep, number=from_checkpoint)
            if checkpoints.exist():
                if not resume:
                    raise ValueError(
                        f"{out} holds a training already: give resume=True to continue it, or another folder"
                    )
                progress, metrics = _restore(checkpoints, trainer, train)
                if from_checkpoint is not None:
                    checkpoints.rewind()
                    progress = forget_newer(out, progress, trainer.transport)
        super().__init__(
            trainer,
            train,
            None if test is None else lambda: _batches_of(test),
            settings,
            checkpoints=checkpoints,
            folder=out,
            callbacks=callbacks,
            progress=progress,
            metrics=metrics,
            quiet=quiet,
            resume_hint=(
                "nothing is saved: give fit(..., out=FOLDER) to be able to continue"
                if out is None
                else f"fit(..., out='{out}', resume=True) continues"
            ),
        )

    def _start(self) -> None:
        if not self._ended:
            self.progress.finished = False  # a finished training continues to a later end
        super()._start()

    def _finish(self) -> None:
        if self.folder is not None:
            exports = {WEIGHTS: self.trainer.weights()}
            if self.trainer.ema is not None:
                exports[AVERAGE] = self.trainer.weights(average=True)
            if self.is_main:
                for name, weights in exports.items():
                    if weights is not None:
                        export_weights(weights, self.folder / name)
                write_json(self.folder / SUMMARY, self._summary())
        super()._finish()

    def _identity(self) -> dict[str, Any]:
        state_dict = getattr(self.train, "state_dict", None)
        return {"source": state_dict() if callable(state_dict) else None}

    def _summary(self) -> dict[str, Any]:
        progress, layout = self.progress, self.trainer.layout
        return {
            **{name: layout[name] for name in ("method", "stages", "schedule", "accumulate", "seed")},
            "ranks": self.transport.position.ranks,
            "replicas": self.transport.position.replicas,
            "staleness": self.trainer.staleness,
            "corrections": layout["corrections"],
            "epochs": self.epoch,
            "steps": self.step,
            "parameters": sum(p.numel() for p in self.trainer.network.parameters()),
            "test_loss": progress.test_loss if self._test is not None else None,
            "test_accuracy": progress.test_accuracy if self._test is not None else None,
            "ema_test_loss": progress.ema_test_loss,
            "ema_test_accuracy": progress.ema_test_accuracy,
            "best": progress.best,
            "best_step": progress.best_step,
            "best_epoch": progress.best_epoch,
            "stopped_early": progress.stopped_early,
            "samples_per_second": progress.rate,
        }

    def result(self) -> FitResult:
        """Return the result after the end of training."""
        progress, records = self.progress, self.records
        if self.folder is not None and self.is_main:
            file = self.folder / METRICS
            records = parse_records(file, file.read_bytes(), "another process has written into it")
        evaluated = [record for record in records if "train_loss" in record]
        return FitResult(
            steps=self.step,
            epochs=self.epoch,
            train_loss=evaluated[-1]["train_loss"] if evaluated else None,
            test_loss=progress.test_loss if self._test is not None else None,
            test_accuracy=progress.test_accuracy if self._test is not None else None,
            ema_test_loss=progress.ema_test_loss,
            ema_test_accuracy=progress.ema_test_accuracy,
            best=progress.best,
            best_step=progress.best_step,
            stopped_early=progress.stopped_early,
            records=records,
        )


def fit(
    trainer: Trainer,
    train: Any,
    test: Any,
    settings: LoopSettings,
    *,
    out: str | Path | None,
    resume: bool,
    from_checkpoint: int | None,
    callbacks: Sequence[Callback],
    quiet: bool,
) -> FitResult:
    """Train; `Trainer.fit` describes the arguments."""
    _check(settings, out, resume, callbacks)
    if from_checkpoint is not None and not resume:
        raise ValueError(f"from_checkpoint is {from_checkpoint}, but resume is False: give resume=True")
    source = as_source(train, trainer.layout["seed"], trainer.transport.position)
    _warn_if_warming_up(trainer, source, settings)
    folder = None if out is None else Path(out).expanduser()
    loop = Fit(
        trainer,
        source,
        test,
        settings,
        out=folder,
        resume=resume,
        from_checkpoint=from_checkpoint,
        callbacks=callbacks,
        quiet=quiet,
    )
    loop.run()
    return loop.result()


def _check(settings: LoopSettings, out: object, resume: bool, callbacks: Sequence[Callback]) -> None:
    """Raise ValueError for an argument that cannot work."""
    if settings.epochs is None and settings.max_steps is None:
        raise ValueError("fit has no end: give epochs, max_steps, or both")
    for name in ("epochs", "max_steps", "eval_every", "log_every", "patience", "keep"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: give 1 or more")
    if resume and out is None:
        raise ValueError("resume is True, but there is no folder to resume from: give out")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ValueError(f"{callback!r} is no callback: give objects of classes derived from petra.Callback")


def _warn_if_warming_up(trainer: Trainer, source: BatchSource, settings: LoopSettings) -> None:
    """Warn if the default learning rate is still rising at the end of the training."""
    curves = (getattr(stage.scheduler, "lr_lambdas", ()) for stage in trainer.stages)
    warmup = max((curve.warmup for found in curves for curve in found if isinstance(curve, WarmupAndDecay)), default=0)
    counts = [] if settings.max_steps is None else [settings.max_steps]
    batches = batch_count(source)
    if settings.epochs is not None and batches is not None:
        counts.append(ceil(settings.epochs * batches / trainer.layout["accumulate"]))
    if counts and min(counts) < warmup and trainer.transport.position.is_main:
        warnings.warn(
            f"the training has {min(counts)} updates, and the default learning rate rises for {warmup}: train longer, "
            "or give an optimizer and a scheduler",
            UserWarning,
            stacklevel=4,
        )


def _batches_of(test: Iterable[Any] | BatchSource) -> Iterable[Any]:
    return test.epoch(0) if isinstance(test, BatchSource) else test


def _restore(checkpoints: Checkpoints, trainer: Trainer, train: BatchSource) -> tuple[RunProgress, MetricsState]:
    """Load the last checkpoint; return the progress, and the metrics file at the checkpoint."""
    trainer.transport.activity.now("reading a checkpoint")
    position, saved = trainer.transport.position, checkpoints.run()
    try:
        stages = {stage.index: checkpoints.stage(stage.index, position.replica) for stage in trainer.stages}
        trainer.load_state_dict({**saved, "stages": stages})
        progress = RunProgress(**saved["progress"])
        if saved["source"] is not None and not hasattr(train, "load_state_dict"):
            raise ValueError("the checkpoint has a position in the data, but the data has no load_state_dict")
        if isinstance(train, LoaderSource):
            train.load_state_dict(saved["source"], within=progress.batch > 0)
        elif saved["source"] is not None:
            train.load_state_dict(saved["source"])  # type: ignore[attr-defined]
        return progress.of_rank(position.is_main), MetricsState.of_checkpoint(saved)
    except LostRank:
        raise
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{checkpoints.folder} does not fit the trainer ({error}): give the network and options it was written with"
        ) from error
