"""A training run from configuration to summary: epochs, evaluation, checkpoints, resume."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from petra import models
from petra.execution import Diverged, Finished
from petra.measure import MemoryProbe, environment
from petra.training import checkpoint, recipes
from petra.training.config import RunConfig
from petra.training.data import Batches, ImageData, load
from petra.training.metrics import MetricsLog
from petra.training.progress import Progress
from petra.training.trainer import Trainer, count_correct, weights_hash

FILES = ("config.json", "checkpoint.pt", "metrics.jsonl", "summary.json", "weights.safetensors")
CONFIG, CHECKPOINT, METRICS, SUMMARY, WEIGHTS = FILES


def refuse_to_overwrite(folder: Path, how: str) -> None:
    """Raise ValueError if there is something in the folder that a new run would write over."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out is {folder}, which is a file: give a folder")
    if any((folder / name).exists() for name in FILES):
        raise ValueError(f"{folder} holds a run already: give {how}, or another --out")


def remove_run(folder: Path) -> None:
    """Remove what a run has written, and nothing else."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)


class Interrupted(Exception):
    """The run was asked to stop; it has written a checkpoint."""


@dataclass
class Position:
    """Where a run is and what it has seen: what a checkpoint adds to the trainer's state."""

    epoch: int = 0
    batch: int = 0
    loss: float = 0.0
    correct: int = 0
    samples: int = 0
    best_accuracy: float = -1.0
    best_epoch: int = 0
    test_loss: float = 0.0
    test_accuracy: float = 0.0
    seconds: float = 0.0
    trained: int = 0
    finished: bool = False
    memory: list[dict[str, int]] = field(default_factory=list)
    activation_peak: int = 0

    def count(self, finished: list[Finished]) -> None:
        """Add micro-batches that have reached the loss to the epoch's figures."""
        for f in finished:
            self.loss += float(f.loss) * len(f.targets)
            self.correct += int(count_correct(f.outputs, f.targets) or 0)
            self.samples += len(f.targets)


class Run:
    """One run in one folder.

    The folder holds ``config.json``, ``metrics.jsonl``, ``checkpoint.pt``, and at the end ``summary.json``
    and ``weights.safetensors``.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        resume: bool = False,
        device: str | torch.device = "cpu",
        tensorboard: bool = False,
        quiet: bool = False,
        data: ImageData | None = None,
    ) -> None:
        config.validate()
        self.config, self.folder, self.device = config, folder, torch.device(device)
        if not resume:
            refuse_to_overwrite(folder, "--resume to continue it")
        data = load(config.data, seed=config.seed) if data is None else data
        self.train = Batches(data, "train", config.batch_size, seed=config.seed, device=self.device)
        self.test = Batches(data, "test", max(config.batch_size, 256), device=self.device)
        torch.manual_seed(config.seed)
        network = models.create(
            config.model,
            **{"num_classes": data.num_classes, "in_channels": data.input_shape[0], **config.model_options},
        )
        curve = recipes.LearningRateCurve(
            config.epochs, len(self.train) / config.accumulate, config.warmup_epochs, tuple(config.drops)
        )
        self.trainer = Trainer(
            network,
            loss=nn.functional.cross_entropy,
            optimizer=lambda parameters: recipes.sgd(
                parameters, lr=config.base_lr, momentum=config.momentum, weight_decay=config.weight_decay
            ),
            method=config.method,
            stages=config.stages,
            scheduler=curve.scheduler,
            accumulate=config.accumulate,
            order=config.order,
            clip_norm=config.clip_norm,
            autocast=config.autocast_dtype,
            seed=config.seed,
            device=self.device,
        )
        self.position = Position()
        keep = self._restore() if resume and (folder / CHECKPOINT).exists() else 0
        checkpoint.write_json(folder / CONFIG, config.to_json())
        self.metrics = MetricsLog(folder / METRICS, keep, folder / "tensorboard" if tensorboard else None)
        self.progress = Progress(config.method, config.epochs, len(self.train), quiet)

    def __call__(self) -> dict[str, Any]:
        """Train to the end and return the summary."""
        try:
            if self.position.finished and (self.folder / SUMMARY).exists():
                return self._summary()
            with _stoppable() as stop:
                while self.position.epoch < self.config.epochs:
                    self._epoch(stop)
            return self._finish()
        finally:
            self.progress.close()
            self.metrics.close()

    def _epoch(self, stop: threading.Event) -> None:
        position = self.position
        self.progress.start(position.epoch, position.batch)
        for x, y in self.train.epoch(position.epoch, position.batch):
            began = time.perf_counter()
            position.count(self._tick(x, y))
            position.seconds += time.perf_counter() - began
            position.trained += len(y)
            position.batch += 1
            self.progress.step(position.loss, position.correct, position.samples, self._rate())
            last = position.batch == len(self.train)
            every = self.config.checkpoint_every
            if stop.is_set() or (not last and every and self.trainer.executor.microbatches % every == 0):
                self._save()
            if stop.is_set():
                raise Interrupted(f"stopped in epoch {position.epoch + 1}; continue with --resume --out {self.folder}")
        if position.epoch == self.config.epochs - 1:
            position.count(self.trainer.drain())
        self._end_epoch()

    def _tick(self, x: torch.Tensor, y: torch.Tensor) -> list[Finished]:
        if self.trainer.executor.microbatches != self._probed_tick():
            return self.trainer.step(x, y)
        with MemoryProbe(self.trainer.executor) as probe:
            finished = self.trainer.step(x, y)
        self.position.memory = [asdict(stage) for stage in probe.stages]
        self.position.activation_peak = probe.activation_peak
        return finished

    def _probed_tick(self) -> int:
        """A tick with a full pipeline and an update in it, on which memory is measured."""
        k, total = self.config.accumulate, self.config.epochs * len(self.train)
        steady = self.trainer.order.staleness(0) + k
        return min(steady + (-steady - 1) % k, total - 1)

    def _end_epoch(self) -> None:
        position = self.position
        test = self.trainer.evaluate(self.test.epoch(0))
        position.test_loss, position.test_accuracy = test.loss, test.accuracy or 0.0
        position.epoch += 1
        if position.test_accuracy > position.best_accuracy:
            position.best_accuracy, position.best_epoch = position.test_accuracy, position.epoch
        samples = position.samples
        record = {
            "epoch": position.epoch,
            "train_loss": position.loss / samples if samples else None,
            "train_accuracy": position.correct / samples if samples else None,
            "test_loss": position.test_loss,
            "test_accuracy": position.test_accuracy,
            "lr": self._learning_rate(),
            "samples_per_second": self._rate(),
        }
        self.metrics.write(self.trainer.executor.microbatches, record)
        self.progress.end(record)
        position.batch, position.loss, position.correct, position.samples = 0, 0.0, 0, 0
        self._save()

    def _finish(self) -> dict[str, Any]:
        config, trainer = self.config, self.trainer
        summary = {
            "method": config.method,
            "model": config.model,
            "data": config.data,
            "stages": [len(stage.chain.layers) for stage in trainer.stages],
            "order": trainer.order.name,
            "staleness": [trainer.order.staleness(stage.index) for stage in trainer.stages],
            "accumulate": config.accumulate,
            "epochs": config.epochs,
            "seed": config.seed,
            "parameters": sum(p.numel() for p in trainer.network.parameters()),
            "test_accuracy": self.position.test_accuracy,
            "test_loss": self.position.test_loss,
            "best_test_accuracy": self.position.best_accuracy,
            "best_epoch": self.position.best_epoch,
            "samples_per_second": self._rate(),
            "activation_peak_bytes": self.position.activation_peak,
            "memory_bytes": self.position.memory,
            "weights_sha256": weights_hash(trainer.network),
            "environment": environment(self.device),
        }
        checkpoint.export_weights(trainer.network, self.folder / WEIGHTS)
        checkpoint.write_json(self.folder / SUMMARY, summary)
        self.position.finished = True
        self._save()
        return summary

    def _rate(self) -> float:
        return self.position.trained / self.position.seconds if self.position.seconds else 0.0

    def _learning_rate(self) -> float:
        optimizer = self.trainer.stages[-1].optimizer
        return float(optimizer.param_groups[0]["lr"]) if optimizer is not None else 0.0

    def _summary(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / SUMMARY).read_text()))
        except ValueError as error:
            raise ValueError(f"{self.folder / SUMMARY} is damaged ({error}): remove it and resume again") from error

    def _save(self) -> None:
        for name, value in self.trainer.network.state_dict().items():
            if not torch.isfinite(value).all():
                raise Diverged(
                    f"{name} is not finite after micro-batch {self.trainer.executor.microbatches - 1}: "
                    "lower the learning rate; the checkpoint before it is kept"
                )
        state = {
            "trainer": self.trainer.state_dict(),
            "position": asdict(self.position),
            "metrics_bytes": self.metrics.size,
        }
        checkpoint.save(self.folder / CHECKPOINT, state)

    def _restore(self) -> int:
        path = self.folder / CHECKPOINT
        state = checkpoint.load(path, self.device)
        try:
            self.trainer.load_state_dict(state["trainer"])
            self.position = Position(**state["position"])
            return int(state["metrics_bytes"])
        except (KeyError, TypeError, RuntimeError) as error:
            reason = str(error).splitlines()[-1].strip()
            raise ValueError(f"{path} does not fit the run ({reason}): are model and data the same?") from error


@contextmanager
def _stoppable() -> Iterator[threading.Event]:
    """An event that is set by the first SIGINT or SIGTERM; the next one acts as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    usual: dict[int, Any] = {}

    def note(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, usual[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        usual[number] = signal.signal(number, note)
    try:
        yield stop
    finally:
        for name, handler in usual.items():
            signal.signal(name, handler)
