"""What a run writes into its folder, and whose run that is."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from petra.execution.job import job_name, restarts
from petra.training import checkpoint

FILES = (
    *("config.json", "metrics.jsonl", "summary.json", "weights.safetensors", "trace.json", "job.json"),
    *("vocabulary.json", "network.json", "fidelity.jsonl", "fidelity.json", "fidelity.png"),
)
CONFIG, METRICS, SUMMARY, WEIGHTS, TRACE, JOB, VOCABULARY, NETWORK, FIDELITY, FIDELITY_SUMMARY, FIDELITY_FIGURE = FILES
CHECKPOINTS = "checkpoint"


class Claim:
    """A folder is one process's to write into until the claim is closed, or the process ends."""

    _open: int | None = None

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._open = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._open, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ValueError(
                f"another process is training in {folder}: wait for its end, or give another --out"
            ) from None
        except OSError:
            pass  # a disk that knows no locks

    def close(self) -> None:
        """Let others have it."""
        if self._open is not None:
            os.close(self._open)
            self._open = None

    __del__ = close


def refuse_file(folder: Path) -> None:
    """Raise ValueError if what is to be a folder is a file."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out is {folder}, which is a file: give a folder")


def refuse_folder(option: str, file: Path) -> None:
    """Raise ValueError if what is to be a file is a folder."""
    if file.is_dir():
        raise ValueError(f"{option} is {file}, which is a folder: give a file")


def refuse_to_overwrite(folder: Path, how: str) -> None:
    """Raise ValueError if there is something in the folder that a new run would write over."""
    refuse_file(folder)
    if any((folder / name).exists() for name in (*FILES, CHECKPOINTS)):
        raise ValueError(f"{folder} holds a run already: give {how}, or another --out")


def refuse_unfinished(folder: Path) -> None:
    """Raise ValueError unless the folder holds a run that has come to its end."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the folder of a run")
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder} holds no run: give the folder of one, as `petra train` writes it")
    if not all((folder / name).exists() for name in (SUMMARY, WEIGHTS)):
        raise ValueError(
            f"the run in {folder} has not finished: `petra train --resume --out {folder}` brings it to its end"
        )


def begun_by_this_job(folder: Path) -> bool:
    """Whether the job that torchrun has now started anew made the run in the folder."""
    try:
        return restarts() > 0 and json.loads((folder / JOB).read_text()) == job_name()
    except (OSError, ValueError):
        return False


def remove_run(folder: Path) -> None:
    """Remove what a run has written, and nothing else."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    checkpoint.remove_all(folder / CHECKPOINTS)
