"""Compares the first epochs of trainings with the stored results, digit by digit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import CURVES, Result, read_lines, rounded
from trials import Trial

COMPARED = ("train_loss", "test_loss", "test_accuracy")
IGNORED = ("checkpoint_every", "checkpoint_epochs")
"""Options that do not affect the compared values."""


def has_epochs(folder: Path, epochs: int) -> bool:
    """Return whether a training has finished this many epochs."""
    return len(read_lines(folder / "metrics.jsonl")) >= epochs


def differences(folder: Path, kept: Result, epochs: int) -> list[str]:
    """Return one message per value that differs from the stored result, or the reason why they cannot be compared."""
    if not (folder / "config.json").exists():
        return ["it did not start"]
    config = json.loads((folder / "config.json").read_text())
    changed = [
        f"{name} is {config[name]}, stored is {value}"
        for name, value in kept["config"].items()
        if name in config and config[name] != value and name not in IGNORED
    ]
    if changed:
        return [f"other options: {', '.join(changed)}"]
    records = read_lines(folder / "metrics.jsonl")
    epochs = min(epochs, len(kept[CURVES["train_loss"][0]]))
    if len(records) < epochs:
        return [f"only {len(records)} of {epochs} epochs were trained"]
    return [line for epoch in range(1, epochs + 1) for line in _of_epoch(epoch, records[epoch - 1], kept)]


def _of_epoch(epoch: int, record: dict[str, Any], kept: Result) -> list[str]:
    found = []
    for name in COMPARED:
        curve, digits = CURVES[name]
        value, was = rounded(record[name], digits), kept[curve][epoch - 1]
        if value != was:
            found.append(f"{name.replace('_', ' ')} of epoch {epoch} is {value}, stored is {was}")
    return found


def report(trials: Sequence[Trial], out: Path, known: dict[str, Result], epochs: int) -> int:
    """Print one line per training and return the number of those that differ from the stored results."""
    different = 0
    for trial in trials:
        found = differences(out / trial.name, known[trial.name], epochs)
        different += bool(found)
        timed = known[trial.name].get("environment", {}).get("cudnn_benchmark", False)
        excuse = " (it was trained with --cudnn-benchmark, so it may differ)" if timed else ""
        print(f"  {trial.name:60} {'as stored' if not found else 'DIFFERS: ' + '; '.join(found[:3]) + excuse}")
    print(f"{len(trials) - different} of {len(trials)} trainings agree with the stored results up to epoch {epochs}")
    return different
