"""A training run from configuration to summary: epochs, evaluation, checkpoints, resume."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from petra.execution import Alone, CapturedExecutor, Diverged, Finished, Transport, run_together
from petra.execution.job import job_name
from petra.measure import MemoryProbe, Timeline
from petra.training import checkpoint
from petra.training.config import RunConfig
from petra.training.data import Batches, Data, fingerprint
from petra.training.files import (
    CHECKPOINTS,
    CONFIG,
    JOB,
    METRICS,
    NETWORK,
    SUMMARY,
    TRACE,
    VOCABULARY,
    WEIGHTS,
    Claim,
    refuse_to_overwrite,
    remove_run,
)
from petra.training.loss import cross_entropy
from petra.training.metrics import MetricsLog, board_writer
from petra.training.orders import ORDERS
from petra.training.position import Position, Watch
from petra.training.progress import Progress
from petra.training.remarks import remarks
from petra.training.stopping import stoppable
from petra.training.summary import read_summary, summarise
from petra.training.trained import Blueprint
from petra.training.trainer import Trainer
from petra.training.weights import same_weights, take_weights


class Interrupted(Exception):
    """The run was asked to stop; it has written a checkpoint."""


class Run:
    """One run in one folder.

    The folder holds ``config.json``, ``network.json``, ``metrics.jsonl``, ``checkpoint/``, for text
    ``vocabulary.json``, and at the end ``summary.json`` and ``weights.safetensors``. With a transport, all ranks make
    the same run; the one that holds the last stage speaks for all of them. On a GPU in one process, ticks are replayed
    unless ``capture`` is False; that changes the speed and nothing else.
    """

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
        capture: bool | None = None,
    ) -> None:
        config.validate()
        if tensorboard:
            board_writer()  # before anything is removed or written
        self.config, self.folder, self.device = config, folder, torch.device(device)
        if not (resume or overwrite):
            refuse_to_overwrite(folder, "--resume to continue it")
        self.transport = transport = transport if transport is not None else Alone(self.device)
        transport.agree(config.to_json())
        place = transport.place
        self._data = config.load_data() if data is None else data
        self._fingerprint = fingerprint(self._data)
        share = (place.replica, place.replicas)
        how: dict[str, Any] = {"device": self.device, "share": share, "channels_last": config.channels_last}
        self.train = Batches(
            self._data, "train", config.batch_size, seed=config.seed, drop_last=config.drop_last, **how
        )
        self.test = Batches(self._data, "test", config.evaluated_at_once(self._data), **how)
        self._blueprint = Blueprint.of(config, self._data)
        self._checkpoints = checkpoint.Checkpoints(folder / CHECKPOINTS, transport, anew=overwrite)
        self._begun = resume and self._checkpoints.exist()  # else the first weights are still to be found
        self._beginning: str | None = None
        self.trainer = self._trainer(transport, config.stages, config.order, placement, capture)
        self.position = Position()
        self._refusal: str | None = None
        self._replayed = 0
        self._filled_from = 0  # the micro-batch at which this pipeline began to fill
        keep = self._restore() if self._begun else 0
        transport.gather(None)  # nobody writes before all have read, and have found nothing wrong
        if place.speaks:
            self._claim = Claim(folder)
            if overwrite:
                remove_run(folder)
            elif self._checkpoints.have_changed():
                self._claim.close()
                raise ValueError(f"another process has trained in {folder} meanwhile: --resume goes on from there")
            checkpoint.write_json(folder / CONFIG, config.to_json())
            checkpoint.write_json(folder / NETWORK, asdict(self._blueprint))
            if self._data.vocabulary:
                checkpoint.write_json(folder / VOCABULARY, self._data.vocabulary)
            if name := job_name():
                checkpoint.write_json(folder / JOB, name)
        board = folder / "tensorboard" if tensorboard else None
        metrics, begun = folder / METRICS if place.speaks else None, self.trainer.executor.microbatches
        self.metrics = MetricsLog(metrics, keep, board, begun)
        self.progress = Progress(config.method, config.epochs, len(self.train), quiet or not place.speaks)
        if resume and not self._begun:
            self.progress.say(f"there is no checkpoint in {folder}: the run begins anew")
        if self._beginning is not None:
            self.progress.say(self._beginning)
        for line in remarks(config, self.trainer):
            self.progress.say(line)
        self._timeline = Timeline(self.trainer.executor, transport, trace) if trace else None

    def _trainer(
        self,
        transport: Transport,
        stages: int | Sequence[int],
        order: str | Sequence[int] | None,
        placement: Sequence[int] | None = None,
        capture: bool | None = False,
    ) -> Trainer:
        config = self.config
        torch.manual_seed(config.seed)
        network = self._blueprint.network()
        if config.weights is not None and not self._begun:
            self._beginning = take_weights(network, config.weights, self._data.vocabulary)
        if config.channels_last:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if config.compile:
            network.compile_functions()
        return Trainer(
            network,
            loss=config.loss,
            optimizer=config.make_optimizer,
            method=config.method,
            stages=stages,
            scheduler=config.curve(len(self.train)).scheduler,
            accumulate=config.accumulate,
            order=order,
            clip_norm=config.clip_norm,
            autocast=config.autocast_dtype,
            seed=config.seed,
            device=self.device,
            transport=transport,
            placement=placement,
            message_dtype=config.message_dtype,
            corrections=config.corrections,
            capture=capture,
        )

    def __call__(self) -> dict[str, Any]:
        """Train to the end and return the summary."""
        with stoppable() as stop:  # to the very end: what is left after the last epoch is not worth stopping for
            try:
                if self.position.finished and all(self.transport.gather((self.folder / SUMMARY).exists())):
                    return self._finished_before()
                while self.position.epoch < self.config.epochs:
                    self._epoch(stop)
                return self._finish()
            finally:
                self.close()

    def close(self) -> None:
        """Leave terminal and files."""
        self.progress.close()
        self.metrics.close()
        if self.transport.place.speaks:
            self._claim.close()

    def _epoch(self, stop: threading.Event) -> None:
        position, watch = self.position, Watch(self.position, self.device)

        def figures() -> tuple[float, int, int, float]:
            position.read()
            watch.lap()
            return position.loss, position.correct, position.samples, position.rate

        self.progress.start(position.epoch, position.batch)
        watch.start()
        for x, y in self.train.epoch(position.epoch, position.batch):
            position.count(self._tick(x, y, self.train.weight(position.batch)))
            position.trained += self.train.size(position.batch)
            position.batch += 1
            self._trace()
            self._look_at_replays()
            stopping = self.transport.any_soon(stop.is_set())
            self.progress.step(figures)
            last = position.batch == len(self.train)
            every = self.config.checkpoint_every
            if stopping or (not last and every and self.trainer.executor.microbatches % every == 0):
                watch.stop()
                self._save()
                watch.start()
            if stopping:
                self._trace(ending=True)
                raise Interrupted(f"stopped in epoch {position.epoch + 1}; continue with --resume --out {self.folder}")
        if position.epoch == self.config.epochs - 1:
            position.count(self.trainer.drain())
            self._trace(ending=True)
        watch.stop()
        self._end_epoch()

    def _tick(self, x: torch.Tensor, y: torch.Tensor, weight: float) -> list[Finished]:
        if self.trainer.executor.microbatches != self._probed_tick():
            return self.trainer.step(x, y, weight)
        with MemoryProbe(self.trainer.executor) as probe:
            finished = self.trainer.step(x, y, weight)
        said = self.transport.gather([[asdict(stage) for stage in probe.stages], probe.activation_peak])
        replicas = self.transport.place.replicas
        self.position.memory = [stage for stages, _ in said[::replicas] for stage in stages]
        self.position.activation_peak = max(peak for _, peak in said)
        return finished

    def _trace(self, ending: bool = False) -> None:
        if self._timeline is None or not (ending or self._timeline.full):
            return
        trace, self._timeline = self._timeline.finish(), None
        if self.transport.place.speaks:
            trace.save(self.folder / TRACE)
            self.progress.say(f"{trace.table()}\ntrace in {self.folder / TRACE}: open it at https://ui.perfetto.dev")

    def _look_at_replays(self) -> None:
        executor = self.trainer.executor
        if isinstance(executor, CapturedExecutor):
            self.position.replayed += executor.replayed - self._replayed
            self._replayed = executor.replayed
            if executor.refusal != self._refusal:
                self._refusal = executor.refusal
                self.progress.say(f"ticks are not replayed: {executor.refusal}")

    def _probed_tick(self) -> int:
        """A tick with a full pipeline and an update in it, on which memory is measured."""
        k, total = self.config.accumulate, self.config.epochs * len(self.train)
        steady = self.trainer.order.staleness(0) + k
        return min(self._filled_from + steady + (-steady - 1) % k, total - 1)

    def _end_epoch(self) -> None:
        position = self.position
        test = self.trainer.evaluate(self.test.epoch(0), cross_entropy)  # never smoothed
        position.test_loss, position.test_accuracy = test.loss, test.accuracy or 0.0
        position.epoch += 1
        if position.test_accuracy > position.best_accuracy:
            position.best_accuracy, position.best_epoch = position.test_accuracy, position.epoch
        loss, correct, samples = self._sums()
        record = {
            "epoch": position.epoch,
            "train_loss": loss / samples if samples else None,
            "train_accuracy": correct / samples if samples else None,
            "test_loss": position.test_loss,
            "test_accuracy": position.test_accuracy,
            "lr": self._learning_rate(),
            "samples_per_second": self.position.rate,
            "seconds": self.position.seconds,
        }
        self.metrics.write(self.trainer.executor.microbatches, record)
        self.progress.end(record)
        position.start_epoch()
        if position.epoch % self.config.checkpoint_epochs == 0 or position.epoch == self.config.epochs:
            self._save()

    def _finish(self) -> dict[str, Any]:
        weights = self._whole_network()
        summary = summarise(self.config, self.trainer, self.position, weights)
        if self.transport.place.speaks:
            checkpoint.export_weights(weights, self.folder / WEIGHTS)
            checkpoint.write_json(self.folder / SUMMARY, summary)
        self.transport.gather(None)
        self.position.finished = True
        self._save()
        return summary

    def _finished_before(self) -> dict[str, Any]:
        """The summary; weights that are missing or damaged are written anew, and older checkpoints removed."""
        if self.transport.place.speaks:
            self._checkpoints.remove_older()
            weights, path = self._whole_network(), self.folder / WEIGHTS
            if not same_weights(weights, path):
                checkpoint.export_weights(weights, path)
                self.progress.say(f"{path} was missing or damaged, and has been written anew")
        return read_summary(self.folder / SUMMARY)

    def _whole_network(self) -> dict[str, torch.Tensor]:
        """All weights in the network's order, those of other ranks from the last checkpoint."""
        own = self.trainer.network.state_dict()
        if not self.transport.place.speaks or not any(value.is_meta for value in own.values()):
            return {name: value for name, value in own.items() if not value.is_meta}
        found: dict[str, torch.Tensor] = {}
        for stage in range(len(self._checkpoints.run()["layout"]["stages"])):  # there may have been others then
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
        self.transport.doing.now("writing a checkpoint")
        state = self.trainer.state_dict()
        loss, correct, samples = self._sums()
        position = replace(self.position, loss=loss, correct=int(correct), samples=int(samples))
        run = {
            "layout": state["layout"],
            "executor": state["executor"],
            "position": asdict(position),
            "metrics_bytes": self.metrics.size,
            "data": self._fingerprint,
            "config": json.dumps(self.config.to_json()),
        }
        self._checkpoints.save(run, state["stages"])

    def _sums(self) -> list[float]:
        """Loss, right answers and samples of the epoch so far, of all replicas."""
        position = self.position
        position.read()
        return self.transport.total([position.loss, position.correct, position.samples])

    def _restore(self) -> int:
        self.transport.doing.now("reading a checkpoint")
        saved = self._checkpoints.run()
        if saved.get("data", self._fingerprint) != self._fingerprint:
            raise ValueError(
                f"{self.config.data} is not the data that the run began with, or has changed since: resume it with that"
            )
        saved["layout"].setdefault("corrections", [])  # of before there were any
        try:
            finished: list[Finished] = []
            self.position = Position(**saved["position"])
            if saved["layout"] == self.trainer.layout:
                replica = self.transport.place.replica
                stages = {s.index: self._checkpoints.stage(s.index, replica) for s in self.trainer.stages}
                self.trainer.load_state_dict({**saved, "stages": stages})
                self._filled_from = saved["executor"]["start"]
            else:
                finished = self._restore_at_another_cut(saved)
                # What was measured is of other stages.
                self.position = replace(self.position, memory=[], activation_peak=0)
            if not self.transport.place.speaks:  # the sums are of all replicas, so only one goes on with them
                self.position = replace(self.position, loss=0.0, correct=0, samples=0)
            else:
                self.position.count(finished)
                self.position.read()
            self.config.refuse_change(saved.get("config", "{}"))  # checkpoints of before have none
            return int(saved["metrics_bytes"])
        except Diverged:
            raise
        except (KeyError, TypeError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
            where = self.folder / CHECKPOINTS
            raise ValueError(f"{where} does not fit the run ({reason}): are model and data the same?") from error

    def _restore_at_another_cut(self, saved: dict[str, Any]) -> list[Finished]:
        """Finish what is in flight with the stages and replicas it belongs to, then take the weights over."""
        layout = saved["layout"]
        for name in ("method", "accumulate", "seed", "messages", "corrections"):
            if layout[name] != self.trainer.layout[name]:
                raise ValueError(f"the checkpoint was written with {name} {layout[name]}: use the same to resume it")
        order = layout["order"] if layout["order"] in ORDERS else layout["in_flight"]

        def drain(transport: Transport) -> tuple[dict[str, Any], list[Finished]]:
            pipelined = self.trainer.method.pipelined
            trainer = self._trainer(transport, layout["stages"], order if pipelined else None)
            indices = range(len(layout["stages"]))
            stages = {index: self._checkpoints.stage(index, transport.place.replica) for index in indices}
            trainer.load_state_dict({**saved, "stages": stages})
            finished = trainer.drain()
            return trainer.state_dict(), finished

        drained = run_together(drain, replicas=layout["replicas"])
        self.trainer.load_drained(drained[0][0])
        self._filled_from = self.trainer.executor.microbatches
        return [one for _, finished in drained for one in finished]
