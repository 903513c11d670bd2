"""A training run from configuration to summary, in a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from petra.data import Data, bits_per_byte, close_batches, fingerprint
from petra.distributed import SingleProcess, Snapshots, Transport
from petra.distributed.job import job_name
from petra.measure import MemoryProbe, Timeline
from petra.pipeline import MicrobatchResult
from petra.runs.config import RunConfig
from petra.runs.file_hashes import FileHash, hash_files, update, write_files
from petra.runs.resume import SnapshotSource, restore
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
from petra.runs.summary import read_summary, summarise
from petra.runs.trained_network import NetworkSpec, vocabulary_files
from petra.runs.trainer_setup import TrainerSetup, config_warnings
from petra.runs.weight_files import same_weights, weight_hashes
from petra.trainer import checkpoint
from petra.trainer.best_weights import AVERAGE, forget_newer
from petra.trainer.callbacks import Callback
from petra.trainer.checkpoint_folder import Checkpoints
from petra.trainer.evaluation import Evaluation
from petra.trainer.loop import TrainingLoop
from petra.trainer.loss import cross_entropy
from petra.trainer.metrics import MetricsState
from petra.trainer.progress import RunProgress

LOCK_PATIENCE = 10.0
"""Seconds to wait for the lock of the folder after a recovery: workers of a lost process may hold it."""


class Run(TrainingLoop):
    """One training run in one folder.

    The folder holds `config.json`, `network.json`, `metrics.jsonl`, `checkpoint/`, `best.safetensors`, for text
    `vocabulary.json` or `tokenizer.json`, and at the end `summary.json` and `weights.safetensors`. With a transport,
    all ranks take part in the same run; the one with the last stage writes the files and the messages. On a GPU in one
    process, ticks are captured as CUDA graphs unless `cuda_graph` is False; that changes the speed and nothing else.

    Args:
        config: The options that decide the result.
        folder: The folder of the run.
        resume: Continue from the last checkpoint, if there is one.
        from_checkpoint: With `resume`, the number of the checkpoint to continue from; None for the last one.
        overwrite: Replace a run that is in the folder.
        device: The device to train on.
        callbacks: Called at the events of the training, such as loggers.
        quiet: Print no progress.
        data: The data, if it has been loaded already.
        transport: Connects the ranks of the run.
        placement: The rank of each stage.
        trace: The number of ticks to write a timeline of.
        cuda_graph: Whether to capture ticks; None decides by the device.
        snapshots: The snapshots of this process, if the job replaces lost processes. If the job has begun the run
            before, it continues from the last snapshot or checkpoint.

    Raises:
        ValueError: If the configuration is not valid, or the folder holds a run that it must not replace.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        resume: bool = False,
        from_checkpoint: int | None = None,
        overwrite: bool = False,
        device: str | torch.device = "cpu",
        callbacks: Sequence[Callback] = (),
        quiet: bool = False,
        data: Data | None = None,
        transport: Transport | None = None,
        placement: Sequence[int] | None = None,
        trace: int = 0,
        cuda_graph: bool | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        config.validate()
        self.config, self.device = config, torch.device(device)
        self.transport = transport = transport if transport is not None else SingleProcess(self.device)
        snapshot, begun = None, False
        if snapshots is not None:
            snapshot, begun = snapshots.recover(transport)
            if begun:
                resume, overwrite, from_checkpoint = True, False, None
        if not (resume or overwrite):
            check_no_run(folder, "--resume to continue it")
        transport.check_agreement(config.to_json())
        self._load_data(data, placement)
        checkpoints = Checkpoints(
            folder / CHECKPOINTS, transport, ignore_existing=overwrite, keep=config.keep, number=from_checkpoint
        )
        resumed = resume and checkpoints.exist()
        files = vocabulary_files(self._data)
        setup = TrainerSetup(config, self._network_spec, len(self.train), self.device, files, resumed=resumed)
        trainer = setup.build(
            transport, config.stages, config.schedule, placement, cuda_graph, flush_until=config.flush_until
        )
        progress, metrics = RunProgress(), MetricsState()
        self._fill_start = 0  # the micro-batch at which this pipeline began to fill
        self._measured_from = 0  # the first micro-batch at which memory may be measured
        self._ineligible_reason: str | None = None
        self._captured_ticks = 0
        saved = RunProgress(**checkpoints.run()["progress"]) if snapshot is not None and resumed else RunProgress()
        if snapshot is not None and saved.microbatches > snapshot.tick:
            snapshot = None
        if snapshot is not None or resumed:
            source = checkpoints if snapshot is None else SnapshotSource(snapshot, transport.position)
            restored = restore(source, trainer, setup, self._fingerprint)
            progress, metrics, self._fill_start = restored.progress, restored.metrics, restored.fill_start
            self._measured_from = trainer.executor.microbatches
        transport.gather(None)  # no rank writes before all have read their files and found no error
        if snapshots is not None and not overwrite and from_checkpoint is None:
            snapshots.begun = True
        if transport.position.is_main:
            self._prepare_folder(folder, checkpoints, overwrite, patience=LOCK_PATIENCE if begun else 0.0)
        if resumed and from_checkpoint is not None:
            progress = self._rewind(folder, checkpoints, progress)
        if snapshots is not None:
            transport.gather(None)  # from here on, there is no older run in the folder
            snapshots.begun = True
            snapshots.connect(transport)
        super().__init__(
            trainer,
            self.train,
            lambda: self.test.epoch(0),
            config.loop_settings,
            checkpoints=checkpoints,
            folder=folder,
            callbacks=callbacks,
            progress=progress,
            metrics=metrics,
            test_loss=cross_entropy,  # without label smoothing
            quiet=quiet,
            resume_hint=f"continue with --resume --out {folder}",
            snapshots=snapshots,
            checkpoint_best_step=None if snapshot is None else saved.best_step,
        )
        if self.is_main:
            self._hash_metrics()
            for file in self._rewritten:
                self.progress_bar.warn(f"{folder / file} was missing, damaged or edited, and has been written again")
        if begun:
            self.progress_bar.write(f"continuing from micro-batch {self.progress.microbatches}")
        elif resume and not resumed:
            self.progress_bar.write(f"there is no checkpoint in {folder}: the run starts from the beginning")
        if setup.weights_message is not None:
            self.progress_bar.write(setup.weights_message)
        self._run_trainer = trainer
        for line in config_warnings(config, self._data, trainer, len(self.train)):
            self.progress_bar.write(line)
        self._timeline = Timeline(self.trainer.executor, transport, trace) if trace else None

    def _load_data(self, data: Data | None, placement: Sequence[int] | None) -> None:
        config, position = self.config, self.transport.position
        self._data = config.load_data() if data is None else data
        self._fingerprint = fingerprint(self._data)
        # Only the rank of the first stage uses the inputs; the others read no images.
        inputs = position.rank == (placement[0] if placement else 0)
        make = partial(
            config.make_batches,
            self._data,
            local_processes=position.replicas,
            device=self.device,
            shard=(position.replica, position.replicas),
            inputs=inputs,
        )
        self.train = make("train", config.batch_size, drop_last=config.drop_last)
        self.test = make("test", config.evaluation_batch_size(self._data))
        self._network_spec = NetworkSpec.of(config, self._data)

    def _prepare_folder(self, folder: Path, checkpoints: Checkpoints, overwrite: bool, patience: float) -> None:
        self._folder_lock = FolderLock(folder, patience)
        if overwrite:
            remove_run(folder)
        elif checkpoints.have_changed():
            self._folder_lock.close()
            raise ValueError(f"another process has trained in {folder} meanwhile: --resume continues from there")
        described = {CONFIG: self.config.to_json(), NETWORK: asdict(self._network_spec)}
        contents = {name: checkpoint.to_json_bytes(value) for name, value in described.items()}
        self._rewritten = write_files(folder, {**contents, **vocabulary_files(self._data)})
        if name := job_name():
            checkpoint.write_json(folder / JOB, name)

    def _rewind(self, folder: Path, checkpoints: Checkpoints, progress: RunProgress) -> RunProgress:
        """Forget what came after the checkpoint to continue from, and return the progress."""
        checkpoints.rewind()
        if self.transport.position.is_main and not progress.finished:
            for name in (SUMMARY, WEIGHTS):
                (folder / name).unlink(missing_ok=True)
        return forget_newer(folder, progress, self.transport)

    def __call__(self) -> dict[str, Any]:
        """Train to the end.

        Returns:
            The contents of `summary.json`.

        Raises:
            Interrupted: If the process was asked to stop; a checkpoint has been written.
            Diverged: If the loss or a weight is not finite.
        """
        self.run()
        return self._summary

    def describe(self) -> dict[str, Any]:
        return self.config.to_json()

    def close(self) -> None:
        """Close the progress bar and the files."""
        super().close()
        for batches in (self.train, self.test):
            close_batches(batches)
        if self.is_main:
            self._folder_lock.close()

    def _tick(self, x: Any, y: Any, weight: float) -> list[MicrobatchResult]:
        if self.trainer.executor.microbatches != self._probed_tick():
            return super()._tick(x, y, weight)
        with MemoryProbe(self.trainer.executor) as probe:
            finished = super()._tick(x, y, weight)
        measured = self.transport.gather([[asdict(stage) for stage in probe.stages], probe.activation_peak])
        replicas = self.transport.position.replicas
        self.progress.memory = [stage for stages, _ in measured[::replicas] for stage in stages]
        self.progress.activation_peak = max(peak for _, peak in measured)
        return finished

    def _after_tick(self) -> None:
        self._trace()
        self._note_captures()
        for line in self._run_trainer.take_messages():
            self.progress_bar.write(line)

    def _before_end(self) -> None:
        self._trace(ending=True)

    def _save(self, wait: bool = True) -> None:
        if self.is_main:
            self._hash_metrics()
        super()._save(wait)

    def _hash_metrics(self) -> None:
        """Record the hash of the metrics so far."""
        metrics = self.metrics.state
        assert metrics.sha256 is not None
        update(self.run_folder, {METRICS: FileHash(metrics.keep_bytes, metrics.sha256)})

    def _trace(self, ending: bool = False) -> None:
        if self._timeline is None or not (ending or self._timeline.full):
            return
        trace, self._timeline = self._timeline.finish(), None
        if self.transport.position.is_main:
            trace.save(self.run_folder / TRACE)
            hash_files(self.run_folder, [TRACE])
            self.progress_bar.write(
                f"{trace.table()}\ntrace in {self.run_folder / TRACE}: open it at https://ui.perfetto.dev"
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
        if self.progress.memory:
            return -1
        schedule = self.trainer.schedule
        # After a resumption, a smaller last micro-batch of the epoch before may be in the pipeline.
        first = max(self._fill_start, self._measured_from) + schedule.staleness(0) + schedule.accumulate
        return min(first + (self._fill_start - first - 1) % schedule.cycle, self._microbatches - 1)

    @property
    def _microbatches(self) -> int:
        """The micro-batches of the whole run, unless it is stopped early."""
        steps, all_epochs = self.config.max_steps, self.config.epochs * len(self.train)
        return all_epochs if steps is None else min(all_epochs, steps * self.config.accumulate)

    def _more(self, evaluation: Evaluation) -> dict[str, Any]:
        bits = bits_per_byte(self._data, evaluation.loss)
        return {} if bits is None else {"bits_per_byte": bits}

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run."""
        assert self._checkpoints is not None
        return self._checkpoints

    @property
    def run_folder(self) -> Path:
        """The folder of the run."""
        assert self.folder is not None
        return self.folder

    def _finish(self) -> None:
        if self.progress.finished and all(self.transport.gather((self.run_folder / SUMMARY).exists())):
            self._summary = self._finished_before()
            return
        weights = self._whole_network()
        bits = bits_per_byte(self._data, self.progress.test_loss)
        averages = self.trainer.weights(average=True) if self.config.ema is not None else None
        self._summary = summarise(self.config, self.trainer, self.progress, weights, bits, self.step)
        if self.is_main:
            self._best.commit()  # the summary has its hash
            if averages is not None:
                checkpoint.export_weights(averages, self.run_folder / AVERAGE)
            self._summary |= weight_hashes(self.run_folder, list(weights), self.progress.best_sha256)
            checkpoint.export_weights(weights, self.run_folder / WEIGHTS)
            write_files(self.run_folder, {SUMMARY: checkpoint.to_json_bytes(self._summary)})
            self._hash_metrics()
        self.transport.gather(None)
        self.progress.finished = True
        self._save()

    def _finished_before(self) -> dict[str, Any]:
        """Return the summary; write missing or damaged weights again, and remove older checkpoints."""
        if self.is_main:
            self.checkpoints.remove_older()
            weights, path = self._whole_network(), self.run_folder / WEIGHTS
            if not same_weights(weights, path):
                checkpoint.export_weights(weights, path)
                self.progress_bar.write(f"{path} was missing or damaged, and has been written again")
        summary = read_summary(self.run_folder, complete=True)
        self.transport.gather(None)  # all ranks have read it
        if self.is_main:
            hash_files(self.run_folder, [SUMMARY])  # an older version has not
        return summary

    def _whole_network(self) -> dict[str, torch.Tensor]:
        """All weights in the order of the network, those of other ranks from the last checkpoint."""
        own = self.trainer.network.state_dict()
        if not self.is_main or not any(value.is_meta for value in own.values()):
            return {name: value for name, value in own.items() if not value.is_meta}
        found: dict[str, torch.Tensor] = {}
        for stage in range(
            len(self.checkpoints.run()["layout"]["stages"])
        ):  # not necessarily the stages of this process
            found |= self.checkpoints.stage(stage)["weights"]["network"]
        return {name: found[name] for name in own}

    def _identity(self) -> dict[str, Any]:
        return {"data": self._fingerprint, "config": json.dumps(self.config.to_json())}
