"""What a run writes into its folder, and whose run that is."""

from __future__ import annotations

import json
from pathlib import Path

from petra.execution.job import job_name, restarts
from petra.training import checkpoint

FILES = (
    *("config.json", "metrics.jsonl", "summary.json", "weights.safetensors", "trace.json", "job.json"),
    *("vocabulary.json", "fidelity.jsonl", "fidelity.json", "fidelity.png"),
)
CONFIG, METRICS, SUMMARY, WEIGHTS, TRACE, JOB, VOCABULARY, FIDELITY, FIDELITY_SUMMARY, FIDELITY_FIGURE = FILES
CHECKPOINTS = "checkpoint"


def refuse_to_overwrite(folder: Path, how: str) -> None:
    """Raise ValueError if there is something in the folder that a new run would write over."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out is {folder}, which is a file: give a folder")
    if any((folder / name).exists() for name in (*FILES, CHECKPOINTS)):
        raise ValueError(f"{folder} holds a run already: give {how}, or another --out")


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
