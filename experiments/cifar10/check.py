"""Whether this code on this machine trains as that which the kept results are of: the first epochs, digit by digit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import CURVES, Result, read_lines, rounded
from trials import Trial

COMPARED = ("train_loss", "test_loss", "test_accuracy")
OF_NO_EFFECT = ("checkpoint_every", "checkpoint_epochs")
"""Options that change nothing of what is compared."""


def has_epochs(folder: Path, epochs: int) -> bool:
    """Whether a training is so far."""
    return len(read_lines(folder / "metrics.jsonl")) >= epochs


def differences(folder: Path, kept: Result, epochs: int) -> list[str]:
    """In words: what is not as it was kept in the first epochs of a training, or why that cannot be said."""
    if not (folder / "config.json").exists():
        return ["it did not begin"]
    config = json.loads((folder / "config.json").read_text())
    said = [
        f"{name} is {config[name]}, kept was {value}"
        for name, value in kept["config"].items()
        if name in config and config[name] != value and name not in OF_NO_EFFECT
    ]
    if said:
        return [f"another training: {', '.join(said)}"]
    records = read_lines(folder / "metrics.jsonl")
    epochs = min(epochs, len(kept[CURVES["train_loss"][0]]))
    if len(records) < epochs:
        return [f"only {len(records)} of {epochs} epochs were made"]
    return [line for epoch in range(1, epochs + 1) for line in _of_epoch(epoch, records[epoch - 1], kept)]


def _of_epoch(epoch: int, record: dict[str, Any], kept: Result) -> list[str]:
    found = []
    for name in COMPARED:
        curve, digits = CURVES[name]
        value, was = rounded(record[name], digits), kept[curve][epoch - 1]
        if value != was:
            found.append(f"{name.replace('_', ' ')} of epoch {epoch} is {value}, kept was {was}")
    return found


def report(trials: Sequence[Trial], out: Path, known: dict[str, Result], epochs: int) -> int:
    """A line for each training and one for what differs; how many are not as they were kept."""
    unlike = 0
    for trial in trials:
        found = differences(out / trial.name, known[trial.name], epochs)
        unlike += bool(found)
        timed = known[trial.name].get("environment", {}).get("cudnn_benchmark", False)
        excuse = " (it was made with --benchmark, so it need not be)" if timed else ""
        print(f"  {trial.name:60} {'as kept' if not found else 'NOT AS KEPT: ' + '; '.join(found[:3]) + excuse}")
    print(f"{len(trials) - unlike} of {len(trials)} trainings are as kept, by their epochs up to {epochs}")
    return unlike
