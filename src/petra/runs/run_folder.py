"""The files of a run in its folder, and checks before they are written or read."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from petra.distributed.job import job_name, restart_count
from petra.trainer.best_weights import AVERAGE, BEST, CHECKPOINTED, PENDING
from petra.trainer.checkpoint_folder import remove_all
from petra.trainer.metrics import DAMAGED

FILES = (
    *("config.json", "metrics.jsonl", "summary.json", "weights.safetensors", "trace.json", "job.json"),
    *("vocabulary.json", "tokenizer.json", "network.json", "fidelity.jsonl", "fidelity.json", "fidelity.png"),
    *("report.html", BEST, PENDING, CHECKPOINTED, AVERAGE, "wandb.json", "mlflow.json", "hashes.json", DAMAGED),
)
CONFIG, METRICS, SUMMARY, WEIGHTS, TRACE, JOB, VOCABULARY, TOKENIZER, NETWORK, *_OTHERS = FILES
FIDELITY, FIDELITY_SUMMARY, FIDELITY_FIGURE, REPORT, *_ = _OTHERS
HASHES = "hashes.json"
CHECKPOINTS = "checkpoint"
FIT_HAS_NO_OPTIONS = "Trainer.fit does not record options."
CONFIG_REMEDY = f"restore a copy; if you edited it on purpose, remove {HASHES}"
"""The remedy for a `config.json` that has changed."""


class FolderLock:
    """Locks a folder for this process until it is closed, or the process ends.

    Args:
        folder: The folder of a run; it is created if there is none.
        patience: The seconds to wait for the lock.

    Raises:
        ValueError: If another process has locked it.
    """

    _descriptor: int | None = None

    def __init__(self, folder: Path, patience: float = 0.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder, os.O_RDONLY)
        deadline = time.monotonic() + patience
        try:
            while not _locked(self._descriptor, wait=time.monotonic() < deadline):
                time.sleep(0.1)
        except BlockingIOError:
            self.close()
            raise ValueError(
                f"another process is training in {folder}: wait until it ends, or give another --out"
            ) from None
        except OSError:
            pass  # a file system without locks

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    __del__ = close


def _locked(descriptor: int, wait: bool) -> bool:
    """Lock a folder; return False if another process has locked it, or raise BlockingIOError if not to `wait`."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise
        return False
    return True


def check_not_file(folder: Path) -> None:
    """Raise ValueError if the path of a folder is a file."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out is {folder}, which is a file: give a folder")


def check_not_folder(option: str, file: Path) -> None:
    """Raise ValueError if the path of a file is a folder."""
    if file.is_dir():
        raise ValueError(f"{option} is {file}, which is a folder: give a file")


def check_no_run(folder: Path, remedy: str) -> None:
    """Raise ValueError if the folder holds a run that a new one would overwrite."""
    check_not_file(folder)
    if any((folder / name).exists() for name in (*FILES, CHECKPOINTS)):
        raise ValueError(f"{folder} holds a run already: give {remedy}, or another --out")


def check_finished(folder: Path) -> None:
    """Raise ValueError unless the folder holds a finished run."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the folder of a run")
    if not (folder / CONFIG).exists():
        if (folder / NETWORK).exists():
            raise ValueError(f"{folder / CONFIG} is missing: {CONFIG_REMEDY}")
        if written_by_fit(folder):
            found = next((name for name in (WEIGHTS, BEST) if (folder / name).exists()), None)
            remedy = "continue it with fit(..., resume=True)"
            if found is not None:
                remedy = f"give safetensors.torch.load_file('{folder / found}') to its load_state_dict"
            raise ValueError(
                f"{folder} was written by Trainer.fit, which does not record the network: create the network, and "
                f"{remedy}"
            )
        raise ValueError(f"{folder} holds no run: give the folder of one, as `petra train` writes it")
    if missing := [name for name in (SUMMARY, WEIGHTS) if not (folder / name).exists()]:
        raise ValueError(
            f"the run in {folder} has not finished (there is no {missing[0]}): "
            f"`petra train --resume --out {folder}` finishes it"
        )


def written_by_fit(folder: Path) -> bool:
    """Return whether `Trainer.fit` has written the folder, which records neither options nor the network."""
    if any((folder / name).exists() for name in (CONFIG, NETWORK)):
        return False
    return any((folder / name).exists() for name in (METRICS, SUMMARY, CHECKPOINTS))


def started_by_this_job(folder: Path) -> bool:
    """Return whether torchrun has restarted this job, and the run in the folder is its own."""
    try:
        return restart_count() > 0 and json.loads((folder / JOB).read_text()) == job_name()
    except (OSError, ValueError):
        return False


def remove_run(folder: Path) -> None:
    """Remove the files of a run, and nothing else."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    remove_all(folder / CHECKPOINTS)
