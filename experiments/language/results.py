"""Results of trainings: read from their folders and stored as one small file each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shared import divergence
from trials import Trial

KEPT = ("test_loss", "bits_per_byte", "test_accuracy", "samples_per_second", "parameters", "schedule", "staleness")
KEPT += ("captured_ticks", "not_captured", "environment")
PER_EPOCH = ("epoch", "train_loss", "test_loss", "bits_per_byte", "samples_per_second", "seconds")

Result = dict[str, Any]
Known = dict[str, Result]


def read(folder: Path) -> Known:
    """Return the stored results by the names of the trainings; raise ValueError if a file is damaged."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        try:
            found[file.stem] = dict(json.loads(file.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}): remove it, or give another --results") from error
    return found


def collect(trials: Iterable[Trial], out: Path, folder: Path) -> None:
    """Store the results of trainings that have ended since, and remove their checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    for trial in trials:
        file, run = folder / f"{trial.name}.json", out / trial.name
        if not file.exists() and (found := of_run(trial, run)) is not None:
            part = file.with_suffix(".part")
            part.write_text(json.dumps(found, indent=1) + "\n")
            part.replace(file)
            shutil.rmtree(run / "checkpoint", ignore_errors=True)


def of_run(trial: Trial, run: Path) -> Result | None:
    """Return the result of a training that is finished or has diverged, which is a result too; None for others."""
    finished, said = (run / "summary.json").exists(), divergence(run)
    if not (run / "config.json").exists() or not (finished or said):
        return None
    config = json.loads((run / "config.json").read_text())
    config.pop("data")  # a path of one machine
    records = read_lines(run / "metrics.jsonl")
    summary = json.loads((run / "summary.json").read_text()) if finished else {}
    return {
        "trial": asdict(trial),
        "options": config,
        "diverged": None if finished else said,
        **{name: summary.get(name) for name in KEPT},
        "updates": _microbatches(records[-1]) // config["accumulate"] if records else None,
        "epochs": [{name: record[name] for name in PER_EPOCH} for record in records],
    }


def _microbatches(record: dict[str, Any]) -> int:
    """Return the micro-batches at a record; older runs call them steps."""
    return int(record.get("microbatches", record["step"]))


def trial_of(result: Result) -> Trial:
    """Return the training of a stored result."""
    stored = dict(result["trial"])
    stored["model"] = tuple((name, value) for name, value in stored["model"])  # JSON has no tuples
    return Trial(**stored)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file without an incomplete last line."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def state(trial: Trial, out: Path, known: Known) -> str:
    """Return the state of a training for the list."""
    if (result := known.get(trial.name)) is None:
        return "stopped" if (out / trial.name / "checkpoint").exists() else "not started"
    return "diverged" if result["diverged"] else f"{result['test_loss']:.4f}"
