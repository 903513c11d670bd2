"""A training run from configuration to summary: epochs, evaluation, checkpoints, resume."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from petra.data import Batches, Data, bits_per_byte, fingerprint
from petra.distributed import SingleProcess, Transport
from petra.distributed.job import job_name
from petra.measure import MemoryProbe, Timeline
from petra.pipeline import Diverged, MicrobatchResult
from petra.runs import checkpoint
from petra.runs.config import RunConfig
from petra.runs.interrupts import Interrupted, stop_on_signal
from petra.runs.metrics import MetricsLog, tensorboard_writer
from petra.runs.progress_bar import ProgressBar
from petra.runs.resume import restore
from petra.runs.run_folder import (
    CHECKPOINTS,
    CONFIG,
    JOB,
    METRICS,
    NETWORK,
    SUMMARY,
    TRACE,
    WEIGHTS,
    FolderLock,
    check_no_run,
    remove_run,
)
from petra.runs.run_progress import RunProgress, ThroughputTimer
from petra.runs.summary import read_summary, summarise
from petra.runs.trained_network import NetworkSpec, vocabulary_files
from petra.runs.trainer_setup import TrainerSetup, config_warnings
from petra.runs.weight_files import same_weights
from petra.trainer.loss import cross_entropy


class Run:
    """One training run in one folder.

    The folder holds `config.json`, `network.json`, `metrics.jsonl`, `checkpoint/`, for text `vocabulary.json` or
    `tokenizer.json`, and at the end `summary.json` and `weights.safetensors`. With a transport, all ranks take part in
    the same run; the one with the last stage writes the files and the messages. On a GPU in one process, ticks are
    captured as CUDA graphs unless `cuda_graph` is False; that changes the speed and nothing else.

    Args:
        config: The options that decide the result.
        folder: The folder of the run.
        resume: Continue from the last checkpoint, if there is one.
        overwrite: Replace a run that is in the folder.
        device: The device to train on.
        tensorboard: Also write metrics for TensorBoard.
        quiet: Print no progress.
        data: The data, if it has been loaded already.
        transport: Connects the ranks of the run.
        placement: The rank of each stage.
        trace: The number of ticks to write a timeline of.
        cuda_graph: Whether to capture ticks; None decides by the device.

    Raises:
        ValueError: If the configuration is not valid, or the folder holds a run that it must not replace.
    """

    on_start: ClassVar[list[Callable[[Run], None]]] = []
    """Functions that are called when training starts or continues; tests inject faults with them."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        resume: bool = False,
        overwrite: bool = False,
        device: str | torch.device = "cpu",
        tensorboard: bool = False,
        quiet: bool = False,
        data: Data | None = None,
        transport: Transport | None = None,
        placement: Sequence[int] | None = None,
        trace: int = 0,
        cuda_graph: bool | None = None,
    ) -> None:
        config.validate()
        if tensorboard:
            tensorboard_writer()  # before anything is removed or written
        self.config, self.folder, self.device = config, folder, torch.device(device)
        if not (resume or overwrite):
            check_no_run(folder, "--resume to continue it")
        self.transport = transport = transport if transport is not None else SingleProcess(self.device)
        transport.check_agreement(config.to_json())
        self._load_data(data)
        self._checkpoints = checkpoint.Checkpoints(folder / CHECKPOINTS, transport, ignore_existing=overwrite)
        resumed = resume and self._checkpoints.exist()
        files = vocabulary_files(self._data)
        setup = TrainerSetup(config, self._network_spec, len(self.train), self.device, files, resumed=resumed)
        self.trainer = setup.build(
            transport, config.stages, config.schedule, placement, cuda_graph, flush_until=config.flush_until
        )
        self.progress, metrics_bytes = RunProgress(), 0
        self._fill_start = 0  # the micro-batch at which this pipeline began to fill
        self._ineligible_reason: str | None = None
        self._captured_ticks = 0
        if resumed:
            restored = restore(self._checkpoints, self.trainer, setup, self._fingerprint)
            self.progress, metrics_bytes, self._fill_start = (
                restored.progress,
                restored.metrics_bytes,
                restored.fill_start,
            )
        transport.gather(None)  # no rank writes before all have read their files and found no error
        if transport.position.is_main:
            self._prepare_folder(overwrite)
        self._open_log(metrics_bytes, tensorboard, quiet)
        if resume and not resumed:
            self.progress_bar.write(f"there is no checkpoint in {folder}: the run starts from the beginning")
        if setup.weights_message is not None:
            self.progress_bar.write(setup.weights_message)
        for line in config_warnings(config, self.trainer):
            self.progress_bar.write(line)
        self._timeline = Timeline(self.trainer.executor, transport, trace) if trace else None

    def _load_data(self, data: Data | None) -> None:
        config, position = self.config, self.transport.position
        self._data = config.load_data() if data is None else data
        self._fingerprint = fingerprint(self._data)
        shard = (position.replica, position.replicas)
        common: dict[str, Any] = {"device": self.device, "shard": shard, "channels_last": config.channels_last}
        self.train = Batches(
            self._data, "train", config.batch_size, seed=config.seed, drop_last=config.drop_last, **common
        )
        self.test = Batches(self._data, "test", config.evaluation_batch_size(self._data), **common)
        self._network_spec = NetworkSpec.of(config, self._data)

    def _prepare_folder(self, overwrite: bool) -> None:
        folder = self.folder
        self._folder_lock = FolderLock(folder)
        if overwrite:
            remove_run(folder)
        elif self._checkpoints.have_changed():
            self._folder_lock.close()
            raise ValueError(f"another process has trained in {folder} meanwhile: --resume continues from there")
        checkpoint.write_json(folder / CONFIG, self.config.to_json())
        checkpoint.write_json(folder / NETWORK, asdict(self._network_spec))
        for file, content in vocabulary_files(self._data).items():
            checkpoint.write_bytes(folder / file, content)
        if name := job_name():
            checkpoint.write_json(folder / JOB, name)

    def _open_log(self, metrics_bytes: int, tensorboard: bool, quiet: bool) -> None:
        is_main, config = self.transport.position.is_main, self.config
        board = self.folder / "tensorboard" if tensorboard else None
        metrics = self.folder / METRICS if is_main else None
        self.metrics = MetricsLog(metrics, metrics_bytes, board, self.trainer.executor.microbatches)
        self.progress_bar = ProgressBar(config.method, config.epochs, len(self.train), quiet or not is_main)

    def __call__(self) -> dict[str, Any]:
        """Train to the end.

        Returns:
            The contents of `summary.json`.

        Raises:
            Interrupted: If the process was asked to stop; a checkpoint has been written.
            Diverged: If the loss or a weight is not finite.
        """
        with stop_on_signal() as stop:  # to the very end: a signal after the last epoch does not stop the rest
            try:
                for callback in self.on_start:
                    callback(self)
                if self.progress.finished and all(self.transport.gather((self.folder / SUMMARY).exists())):
                    return self._finished_before()
                while self.progress.epoch < self.config.epochs:
                    self._epoch(stop)
                return self._finish()
            finally:
                self.close()

    def close(self) -> None:
        """Close the progress bar and the files."""
        self.progress_bar.close()
        self.metrics.close()
        if self.transport.position.is_main:
            self._folder_lock.close()

    def _epoch(self, stop: threading.Event) -> None:
        progress, timer = self.progress, ThroughputTimer(self.progress, self.device)

        def figures() -> tuple[float, int, int, float]:
            progress.read()
            timer.lap()
            return progress.loss, progress.correct, progress.samples, progress.rate

        self.progress_bar.start(progress.epoch, progress.batch)
        timer.start()
        for x, y in self.train.epoch(progress.epoch, progress.batch):
            progress.count(self._tick(x, y, self.train.weight(progress.batch)))
            progress.trained += self.train.size(progress.batch)
            progress.batch += 1
            self._trace()
            self._note_captures()
            stopping = self.transport.any_rank_async(stop.is_set())
            self.progress_bar.step(figures)
            last = progress.batch == len(self.train)
            every = self.config.checkpoint_every
            if stopping or (not last and every and self.trainer.executor.microbatches % every == 0):
                timer.stop()
                self._save()
                timer.start()
            if stopping:
                self._trace(ending=True)
                raise Interrupted(f"stopped in epoch {progress.epoch + 1}; continue with --resume --out {self.folder}")
        if progress.epoch == self.config.epochs - 1:
            progress.count(self.trainer.drain())
            self._trace(ending=True)
        timer.stop()
        self._end_epoch()

    def _tick(self, x: torch.Tensor, y: torch.Tensor, weight: float) -> list[MicrobatchResult]:
        if self.trainer.executor.microbatches != self._probed_tick():
            return self.trainer.step(x, y, weight)
        with MemoryProbe(self.trainer.executor) as probe:
            finished = self.trainer.step(x, y, weight)
        measured = self.transport.gather([[asdict(stage) for stage in probe.stages], probe.activation_peak])
        replicas = self.transport.position.replicas
        self.progress.memory = [stage for stages, _ in measured[::replicas] for stage in stages]
        self.progress.activation_peak = max(peak for _, peak in measured)
        return finished

    def _trace(self, ending: bool = False) -> None:
        if self._timeline is None or not (ending or self._timeline.full):
            return
        trace, self._timeline = self._timeline.finish(), None
        if self.transport.position.is_main:
            trace.save(self.folder / TRACE)
            self.progress_bar.write(
                f"{trace.table()}\ntrace in {self.folder / TRACE}: open it at https://ui.perfetto.dev"
            )

    def _note_captures(self) -> None:
        executor = self.trainer.executor
        if (capture := executor.capture) is not None:
            self.progress.captured_ticks += capture.captured_ticks - self._captured_ticks
            self._captured_ticks = capture.captured_ticks
            if capture.ineligible_reason != self._ineligible_reason:
                self._ineligible_reason = capture.ineligible_reason
                self.progress_bar.write(f"ticks are not captured: {capture.ineligible_reason}")

    def _probed_tick(self) -> int:
        """The tick on which memory is measured, with a full pipeline and an update."""
        schedule, total = self.trainer.schedule, self.config.epochs * len(self.train)
        steady = schedule.staleness(0) + schedule.accumulate
        return min(self._fill_start + steady + (-steady - 1) % schedule.cycle, total - 1)

    def _end_epoch(self) -> None:
        progress = self.progress
        test = self.trainer.evaluate(self.test.epoch(0), cross_entropy)  # without label smoothing
        progress.test_loss, progress.test_accuracy = test.loss, test.accuracy or 0.0
        progress.epoch += 1
        if progress.test_accuracy > progress.best_accuracy:
            progress.best_accuracy, progress.best_epoch = progress.test_accuracy, progress.epoch
        loss, correct, samples = self._sums()
        record: dict[str, Any] = {
            "epoch": progress.epoch,
            "train_loss": loss / samples if samples else None,
            "train_accuracy": correct / samples if samples and correct >= 0 else None,
            "test_loss": progress.test_loss,
            "test_accuracy": progress.test_accuracy,
            "lr": self._learning_rate(),
            "samples_per_second": progress.rate,
            "seconds": progress.seconds,
        }
        if (bits := bits_per_byte(self._data, test.loss)) is not None:
            record["bits_per_byte"] = bits
        self.metrics.write(self.trainer.executor.microbatches, record)
        self.progress_bar.end(record)
        progress.start_epoch()
        if progress.epoch % self.config.checkpoint_epochs == 0 or progress.epoch == self.config.epochs:
            self._save()

    def _finish(self) -> dict[str, Any]:
        weights = self._whole_network()
        bits = bits_per_byte(self._data, self.progress.test_loss)
        summary = summarise(self.config, self.trainer, self.progress, weights, bits)
        if self.transport.position.is_main:
            checkpoint.export_weights(weights, self.folder / WEIGHTS)
            checkpoint.write_json(self.folder / SUMMARY, summary)
        self.transport.gather(None)
        self.progress.finished = True
        self._save()
        return summary

    def _finished_before(self) -> dict[str, Any]:
        """Return the summary; write missing or damaged weights again, and remove older checkpoints."""
        if self.transport.position.is_main:
            self._checkpoints.remove_older()
            weights, path = self._whole_network(), self.folder / WEIGHTS
            if not same_weights(weights, path):
                checkpoint.export_weights(weights, path)
                self.progress_bar.write(f"{path} was missing or damaged, and has been written again")
        return read_summary(self.folder / SUMMARY)

    def _whole_network(self) -> dict[str, torch.Tensor]:
        """All weights in the order of the network, those of other ranks from the last checkpoint."""
        own = self.trainer.network.state_dict()
        if not self.transport.position.is_main or not any(value.is_meta for value in own.values()):
            return {name: value for name, value in own.items() if not value.is_meta}
        found: dict[str, torch.Tensor] = {}
        for stage in range(
            len(self._checkpoints.run()["layout"]["stages"])
        ):  # not necessarily the stages of this process
            found |= self._checkpoints.stage(stage)["weights"]["network"]
        return {name: found[name] for name in own}

    def _learning_rate(self) -> float:
        optimizer = self.trainer.stages[-1].optimizer
        return float(optimizer.param_groups[0]["lr"]) if optimizer is not None else 0.0

    def _save(self) -> None:
        for name, value in self.trainer.network.state_dict().items():
            if not value.is_meta and not torch.isfinite(value).all():
                raise Diverged(
                    f"{name} is not finite after micro-batch {self.trainer.executor.microbatches - 1}: "
                    "lower the learning rate; the checkpoint before it is kept"
                )
        self.transport.activity.now("writing a checkpoint")
        state = self.trainer.state_dict()
        loss, correct, samples = self._sums()
        progress = replace(self.progress, loss=loss, correct=int(correct), samples=int(samples))
        run = {
            "layout": state["layout"],
            "executor": state["executor"],
            "progress": asdict(progress),
            "metrics_bytes": self.metrics.size,
            "data": self._fingerprint,
            "config": json.dumps(self.config.to_json()),
        }
        self._checkpoints.save(run, state["stages"])

    def _sums(self) -> list[float]:
        """The loss, correct answers (negative if unknown) and samples of the epoch so far, summed over all replicas."""
        progress = self.progress
        progress.read()
        return self.transport.total([progress.loss, progress.correct, progress.samples])
