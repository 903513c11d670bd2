"""The best weights of a training: which evaluation was the best, and the file with its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from petra.distributed import Transport
from petra.trainer.checkpoint import export_weights
from petra.trainer.progress import RunProgress
from petra.trainer.state import weights_hash

if TYPE_CHECKING:
    from petra.trainer.trainer import Trainer

BEST, PENDING, AVERAGE = "best.safetensors", "pending-best.safetensors", "ema.safetensors"
CHECKPOINTED = "checkpointed-best.safetensors"
MONITORS = ("accuracy", "loss")


@dataclass(frozen=True)
class Monitor:
    """Finds the best evaluation.

    It compares the accuracy or the loss on the test data: of averaged weights where there are any. Without test data,
    it compares the training loss.
    """

    metric: str | None
    """`"accuracy"` or `"loss"`; None means accuracy where it is known."""
    min_delta: float = 0.0
    """The smallest change that counts as an improvement for early stopping."""

    def update(self, progress: RunProgress, record: dict[str, Any], step: int, epoch: float) -> bool:
        """Note an evaluation in the progress, and return whether it is the best so far."""
        name, value = self._value(record)
        if value is None:
            return False
        better = 1 if name == "accuracy" else -1
        if progress.reference is None or better * (value - progress.reference) > self.min_delta:
            progress.reference, progress.stale_evaluations = value, 0
        else:
            progress.stale_evaluations += 1
        if progress.best is not None and better * (value - progress.best) <= 0:
            return False
        progress.best, progress.best_step, progress.best_epoch = value, step, epoch
        accuracy = record.get("ema_test_accuracy", record.get("test_accuracy"))
        progress.best_accuracy = accuracy if accuracy is not None else -1.0
        return True

    def _value(self, record: dict[str, Any]) -> tuple[str, float | None]:
        prefix = next((kind for kind in ("ema_test", "test") if f"{kind}_loss" in record), "train")
        accuracy, loss = record.get(f"{prefix}_accuracy"), record.get(f"{prefix}_loss")
        if self.metric == "accuracy" and accuracy is None:
            raise ValueError("the monitored metric is the accuracy, but it is unknown: monitor the loss")
        chosen = self.metric or ("loss" if accuracy is None or prefix == "train" else "accuracy")
        return chosen, accuracy if chosen == "accuracy" else loss


class BestWeights:
    """The file with the best weights.

    New best weights are written to a second file, which replaces the first one when the next checkpoint is complete. So
    a training that is resumed from the checkpoint has the best weights up to there, and not those of its lost future.
    While a checkpoint is being written, the file with the weights it includes has another name: an evaluation may write
    a newer one.

    Args:
        folder: The folder of the file; None writes no weights.
        trainer: The trainer.
    """

    def __init__(self, folder: Path | None, trainer: Trainer) -> None:
        self._folder, self._trainer = folder, trainer

    def write(self, step: int) -> str | None:
        """Write the current weights, and return their hash; all ranks call it, and only the main one has a hash."""
        if self._folder is None:
            return None
        weights = self._trainer.weights(average=self._trainer.ema is not None)
        if weights is None:
            return None
        assert self._folder is not None
        export_weights(weights, self._folder / PENDING, {"step": str(step)})
        return weights_hash(weights)

    def start_checkpoint(self) -> None:
        """Note that a checkpoint has started, which knows the weights that were written last."""
        self._rename(PENDING, CHECKPOINTED)

    def commit(self) -> None:
        """Make the weights that the checkpoint includes those of the file: it is complete."""
        self._rename(CHECKPOINTED, BEST)

    def _rename(self, name: str, to: str) -> None:
        if self._folder is not None and self._is_main and (self._folder / name).exists():
            (self._folder / name).replace(self._folder / to)

    def recover(self, progress: RunProgress, checkpoint_step: int | None = None) -> str | None:
        """Commit or remove weights that were written before the process ended.

        Args:
            progress: The progress to continue from, that of the last checkpoint or of a snapshot.
            checkpoint_step: If it is that of a snapshot, the step of the best weights at the last checkpoint.

        Returns:
            A warning if the best weights are missing or damaged.
        """
        if self._folder is None or not self._is_main:
            return None
        if checkpoint_step is not None:
            for name, step in ((CHECKPOINTED, checkpoint_step), (PENDING, progress.best_step)):
                if (self._folder / name).exists() and _step_of(self._folder / name) != step:
                    (self._folder / name).unlink()
            self.commit()
            return None  # what was removed is written again by the next evaluations
        for name in (CHECKPOINTED, PENDING):
            if (self._folder / name).exists() and _step_of(self._folder / name) == progress.best_step > 0:
                self._rename(name, BEST)
            (self._folder / name).unlink(missing_ok=True)
        file, expected = self._folder / BEST, progress.best_sha256
        if expected is None or _hash_of(file, list(self._trainer.network.state_dict())) == expected:
            return None
        state = "damaged or of another run" if file.exists() else "missing"
        return f"{file} is {state}: restore a copy, or do without the weights of step {progress.best_step}"

    @property
    def _is_main(self) -> bool:
        return self._trainer.transport.position.is_main


def forget_newer(folder: Path, progress: RunProgress, transport: Transport) -> RunProgress:
    """Remove best weights that are newer than the checkpoint to continue from; all ranks call it.

    Args:
        folder: The folder of the training.
        progress: The progress at the checkpoint.
        transport: Connects the ranks.

    Returns:
        The progress. It has no best evaluation if its weights have been replaced by newer ones.
    """
    file = folder / BEST
    newer = transport.position.is_main and file.exists() and _step_of(file) != progress.best_step
    if not any(transport.gather(newer)):
        return progress
    if newer:
        file.unlink()
    return replace(progress, best=None, best_accuracy=-1.0, best_epoch=0, best_step=0, best_sha256=None)


def _hash_of(file: Path, names: list[str]) -> str | None:
    """Return the hash of the weights in a file, in the order of `names`; None if it is missing or damaged."""
    try:
        found = load_file(file)
        return weights_hash({name: found[name] for name in names if name in found})
    except (SafetensorError, OSError):
        return None


def _step_of(file: Path) -> int:
    """Return the step at which a file of weights was written; -1 if it does not say."""
    try:
        with safe_open(file, "pt") as found:
            return int((found.metadata() or {}).get("step", -1))
    except (SafetensorError, OSError, ValueError):
        return -1
