"""Restores a run from its last checkpoint, also with other stages or replicas than it was written with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from petra.distributed import LostRank, RankPosition, SingleProcess, Snapshot, Transport, run_together
from petra.distributed.snapshots import needed
from petra.pipeline import Diverged, MicrobatchResult
from petra.runs.config import RunConfig
from petra.runs.file_hashes import ChangedFile
from petra.runs.run_folder import CHECKPOINTS, CONFIG
from petra.runs.trainer_setup import TrainerSetup
from petra.trainer.checkpoint_folder import Checkpoints
from petra.trainer.metrics import MetricsState
from petra.trainer.progress import RunProgress
from petra.trainer.schedules import IN_FLIGHT
from petra.trainer.trainer import Trainer


@dataclass(frozen=True)
class Restored:
    """The state of a run that a checkpoint holds next to that of the trainer."""

    progress: RunProgress
    metrics: MetricsState
    """The metrics file at the checkpoint."""
    fill_start: int
    """The micro-batch at which the pipeline began to fill."""


HARMLESS = ("checkpoint_every", "checkpoint_epochs", "keep", "save_best", "data", "workers")
"""Options that may be edited in `config.json`. Data is compared with its fingerprint."""


def read_config(folder: Path) -> tuple[RunConfig, str | None]:
    """Read the configuration of a run to resume.

    A `config.json` that is missing or damaged is replaced by the options in the last checkpoint. Options that decide
    no result may have been edited.

    Args:
        folder: The folder of the run.

    Returns:
        The configuration, and a warning if the file was missing or damaged.

    Raises:
        ValueError: If the file was edited, or is damaged and there is no checkpoint.
    """
    file = folder / CONFIG
    try:
        return RunConfig.read(file), None
    except ValueError as error:
        saved = _saved_config(folder)
        if saved is None:
            raise
        try:
            found = RunConfig.read(file, edited=True)
        except (OSError, ValueError):
            state = "damaged" if file.exists() else "missing"
            message = f"{file} was {state}: the run continues with the options in its last checkpoint"
            return RunConfig.from_json(json.loads(saved)), message
        if not isinstance(error, ChangedFile):
            raise
        found.check_unchanged(saved, may_change=HARMLESS)
        return found, None


def _saved_config(folder: Path) -> str | None:
    """Return the options in the last checkpoint of a run; None if there is no checkpoint."""
    checkpoints = Checkpoints(folder / CHECKPOINTS, SingleProcess())
    if not checkpoints.exist():
        return None
    saved = checkpoints.run().get("config")
    return saved if isinstance(saved, str) else None


class StateSource(Protocol):
    """The states of a run at one moment."""

    @property
    def folder(self) -> object:
        """Where the states are, for messages."""

    def run(self) -> dict[str, Any]:
        """Return the state of the whole run."""

    def stage(self, index: int, replica: int = 0) -> dict[str, Any]:
        """Return the state of a stage."""


class SnapshotSource:
    """The states in a snapshot.

    Args:
        snapshot: The snapshot, with the parts that this process needs.
        position: The position of this process.
    """

    folder = "the snapshot"

    def __init__(self, snapshot: Snapshot, position: RankPosition) -> None:
        self._parts = {part: snapshot.state(part) for part in needed(position, snapshot.ranks, snapshot.replicas)}
        self._last = snapshot.ranks - 1, position.replica
        self._position = position
        self._same = (position.ranks, position.replicas) == (snapshot.ranks, snapshot.replicas)

    def run(self) -> dict[str, Any]:
        position = self._position
        if self._same:
            return dict(self._parts[position.rank, position.replica]["run"])
        run = self._parts[self._last]["run"]
        # The rank of the loss continues the sums.
        progress = RunProgress(**run["progress"]).of_rank(position.rank == position.ranks - 1)
        return {**run, "progress": asdict(progress)}

    def stage(self, index: int, replica: int = 0) -> dict[str, Any]:
        stages = [part["stages"] for (_, of), part in self._parts.items() if of == replica]
        found: dict[str, Any] = next(own[index] for own in stages if index in own)
        return found


def restore(source: StateSource, trainer: Trainer, setup: TrainerSetup, fingerprint: str) -> Restored:
    """Load the last checkpoint, or a snapshot, into a trainer.

    Args:
        source: The checkpoints of the run, or a snapshot.
        trainer: The trainer of the run.
        setup: Builds a trainer with the stages of the checkpoint, if these are others.
        fingerprint: The fingerprint of the data.

    Returns:
        The rest of the state.

    Raises:
        ValueError: If the checkpoint is damaged, or of another configuration or other data.
    """
    trainer.transport.activity.now("reading a checkpoint")
    position, saved = trainer.transport.position, source.run()
    try:
        if saved["data"] != fingerprint:
            raise ValueError(
                f"{setup.config.data} is not the data that the run started with, or has changed since: resume it with "
                "the same data"
            )
        finished: list[MicrobatchResult] = []
        progress = RunProgress(**saved["progress"])
        if saved["layout"] == trainer.layout:
            stages = {stage.index: source.stage(stage.index, position.replica) for stage in trainer.stages}
            trainer.load_state_dict({**saved, "stages": stages})
            fill_start = saved["executor"]["start"]
            if saved["placement"] != trainer.placement:  # a process holds other stages
                progress = replace(progress, memory=[], activation_peak=0)
        else:
            assert isinstance(source, Checkpoints)  # a snapshot is of the same run
            finished = _restore_other_layout(source, trainer, setup, saved)
            fill_start = trainer.executor.microbatches
            progress = replace(progress, memory=[], activation_peak=0)  # they were measured on other stages
        if isinstance(source, Checkpoints):
            progress = progress.of_rank(position.is_main)
        if position.is_main:
            progress.count(finished)
            progress.read()
        setup.config.check_unchanged(saved["config"])
        return Restored(progress, MetricsState.of_checkpoint(saved), fill_start)
    except (Diverged, LostRank):
        raise
    except (KeyError, TypeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        raise ValueError(
            f"{source.folder} does not fit the run ({reason}): give the model and data it was written with"
        ) from error


def _restore_other_layout(
    checkpoints: Checkpoints, trainer: Trainer, setup: TrainerSetup, saved: dict[str, Any]
) -> list[MicrobatchResult]:
    """Finish the micro-batches in flight with the stages and replicas of the checkpoint, then load its weights."""
    layout = saved["layout"]
    for name in ("method", "accumulate", "seed", "comm_dtype", "corrections"):
        if layout[name] != trainer.layout[name]:
            raise ValueError(f"the checkpoint was written with {name} {layout[name]}: use the same to resume it")
    schedule = layout["in_flight"] if layout["schedule"] == IN_FLIGHT else layout["schedule"]

    def drain(transport: Transport) -> tuple[dict[str, Any], list[MicrobatchResult]]:
        old = setup.build(transport, layout["stages"], schedule, flush_until=layout["flush_until"])
        indices = range(len(layout["stages"]))
        stages = {index: checkpoints.stage(index, transport.position.replica) for index in indices}
        old.load_state_dict({**saved, "stages": stages})
        finished = old.drain()
        return old.state_dict(), finished

    drained = run_together(drain, replicas=layout["replicas"])
    trainer.load_drained(drained[0][0])
    return [one for _, finished in drained for one in finished]
