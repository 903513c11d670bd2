"""What trainings came to: read from their folders, and kept in one small file that outlasts them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import isclose
from pathlib import Path
from statistics import fmean
from typing import Any

from plans import Trial

from petra.measure.likeness import FIGURES

FILE = "runs.json"
KEPT = ("order", "staleness", "corrections", "parameters", "test_accuracy", "test_loss", "best_test_accuracy")
KEPT += ("samples_per_second", "environment")

Result = dict[str, Any]


def read(folder: Path) -> dict[str, Result]:
    """Results of earlier calls, by the names of the trainings."""
    file = folder / FILE
    return json.loads(file.read_text()) if file.exists() else {}


def collect(trials: Iterable[Trial], out: Path, folder: Path) -> dict[str, Result]:
    """Earlier results and those of trainings that have finished since, written back into ``folder``."""
    known = read(folder)
    for trial in trials:
        if trial.name not in known and (found := of_run(trial, out / trial.name)) is not None:
            known[trial.name] = found
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / (FILE + ".part")
    lines = (f"{json.dumps(name)}: {json.dumps(result)}" for name, result in sorted(known.items()))
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    part.replace(folder / FILE)
    return known


def of_run(trial: Trial, folder: Path) -> Result | None:
    """What a finished training came to; None for others."""
    if not (folder / "summary.json").exists() or not (folder / "metrics.jsonl").exists():
        return None
    if trial.command == "fidelity" and not (folder / "fidelity.json").exists():
        return None
    summary = json.loads((folder / "summary.json").read_text())
    records = _lines(folder / "metrics.jsonl")
    config = json.loads((folder / "config.json").read_text())
    config.pop("data", None)  # a path of one machine
    late = [r["test_accuracy"] for r in records if isclose(r["lr"], records[-1]["lr"])]
    found = {
        "config": config,
        **{name: summary[name] for name in KEPT},
        "best_after_last_drop": max(late),
        "mean_after_last_drop": fmean(late[-10:]),
        "train_loss": records[-1]["train_loss"],
        "test_accuracies": [round(r["test_accuracy"], 5) for r in records],
        # None while nothing has come through the pipeline, as in an epoch that is shorter than it
        "train_losses": [r["train_loss"] and round(r["train_loss"], 5) for r in records],
    }
    return found | ({"likeness": likeness(folder / "fidelity.jsonl")} if trial.command == "fidelity" else {})


def likeness(file: Path) -> list[dict[str, Any]]:
    """Means over each epoch of what `petra fidelity` has measured of each stage."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in _lines(file):
        if row["stage"] != "all":
            groups.setdefault((int(-(-row["epoch"] // 1)), row["stage"]), []).append(row)
    return [{"epoch": e, "stage": s, **_means(rows)} for (e, s), rows in sorted(groups.items())]


def _means(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    found = {name: [row[name] for row in rows if row[name] is not None] for name in FIGURES}
    return {name: round(fmean(values), 5) if values else None for name, values in found.items()}


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def state(trial: Trial, out: Path, known: dict[str, Result]) -> str:
    """In words: how far a training is."""
    if trial.name in known:
        return "done"
    metrics = out / trial.name / "metrics.jsonl"
    if (out / trial.name / "checkpoint").exists():
        return f"{len(_lines(metrics)) if metrics.exists() else 0} of {trial.options['epochs']} epochs"
    return "not begun"
