"""Results of trainings: read from their folders and stored in one small file."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import ceil, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from jobs import divergence
from trials import Trial

from petra.measure.gradient_similarity import METRICS, summarise

FILE = "runs.json"
DIVERGED = "diverged"
"""Key of the message with which a training diverged."""
KEPT: tuple[str, ...] = ("schedule", "staleness", "corrections", "parameters", "samples_per_second", "environment")
KEPT += ("test_accuracy", "test_loss", "best_test_accuracy")
CURVES = {  # stored values of every epoch, by Petra's name: the key and the number of digits
    "test_accuracy": ("test_accuracies", 4),
    "test_loss": ("test_losses", 4),
    "train_loss": ("train_losses", 4),
    "seconds": ("seconds", 1),
}
SIGMA = ("stage", "measurements", "sigma", "lowest_sigma")
EVERY_SIGMA = "sigma_by_update"
"""Key of σ at every update, by stage and for all stages together, of trainings that measure every update."""

COMPACT = (",", ":")

Result = dict[str, Any]


def read(folder: Path) -> dict[str, Result]:
    """Return the stored results by the names of the trainings."""
    file = folder / FILE
    return json.loads(file.read_text()) if file.exists() else {}


def collect(trials: Iterable[Trial], out: Path, folder: Path) -> dict[str, Result]:
    """Add the results of trainings that have ended since to those stored in `folder`, and return all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        known = read(folder)
        for trial in trials:
            if trial.name not in known and (found := of_run(trial, out / trial.name)) is not None:
                known[trial.name] = found
        _write(known, folder)
    return known


def _write(known: dict[str, Result], folder: Path) -> None:
    part = folder / (FILE + ".part")
    lines = (f"{json.dumps(name)}: {json.dumps(result, separators=COMPACT)}" for name, result in sorted(known.items()))
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    part.replace(folder / FILE)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, so that results added by another runner are not lost."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def of_run(trial: Trial, folder: Path) -> Result | None:
    """Return the result of a training that is finished or has diverged, which is a result too; None for others."""
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
    config.pop("data", None)  # a path of one machine
    if _finished(trial, folder):
        summary = json.loads((folder / "summary.json").read_text())
        lines = read_lines(folder / "metrics.jsonl")
        # The learning rate does not help: that of an epoch's line is the next update's and may have dropped already.
        dropped = max(config["lr_milestones"]) * config["epochs"] + 1e-9
        late = [r["test_accuracy"] for epoch, r in enumerate(lines, start=1) if epoch > dropped or epoch == len(lines)]
        ended = {
            **{name: summary[name] for name in KEPT},
            "best_after_last_drop": max(late),
            "mean_after_last_drop": fmean(late[-10:]),
            "train_loss": lines[-1]["train_loss"],
        }
    elif said := divergence(folder):
        ended = {DIVERGED: said}
    else:
        return None
    found = {"config": config, **ended, **_epochs(read_lines(folder / "metrics.jsonl"))}
    if trial.watched:
        measured = read_lines(folder / "fidelity.jsonl")
        found |= _measured(measured) | ({EVERY_SIGMA: _every_sigma(measured)} if trial.options["every"] == 1 else {})
    return found


def _finished(trial: Trial, folder: Path) -> bool:
    names = ("summary.json", "metrics.jsonl", *(("fidelity.json",) if trial.watched else ()))
    return all((folder / name).exists() for name in names)


def _epochs(records: Sequence[dict[str, Any]]) -> Result:
    """One number per epoch; None where there is none, such as the loss of an epoch shorter than the pipeline."""
    return {kept: [rounded(r[name], digits) for r in records] for name, (kept, digits) in CURVES.items()}


def rounded(value: float | None, digits: int) -> float | None:
    """Return a value as it is stored."""
    return None if value is None or not isfinite(value) else round(value, digits)


def records(result: Result) -> list[dict[str, Any]]:
    """Return the stored values of every epoch in the format of Petra's metrics."""
    columns = {name: result[kept] for name, (kept, _) in CURVES.items()}
    epochs = zip(*columns.values(), strict=True)
    return [{"epoch": epoch, **dict(zip(columns, row, strict=True))} for epoch, row in enumerate(epochs, start=1)]


def _measured(rows: list[dict[str, Any]]) -> Result:
    """Means of the figures of `petra fidelity` by epoch and stage, and σ over the whole training."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    rows = [row for row in rows if row["stage"] != "all"]
    for row in rows:
        groups.setdefault((ceil(row["epoch"]), row["stage"]), []).append(row)
    table = [[epoch, stage, *_means(own)] for (epoch, stage), own in sorted(groups.items())]
    return {
        "similarity": {"names": ["epoch", "stage", *METRICS], "rows": table},  # names in every row would be most of it
        "sigma": [{name: row[name] for name in SIGMA} for row in summarise(rows)],
    }


def _every_sigma(rows: Iterable[dict[str, Any]]) -> dict[str, list[float | None]]:
    by_stage: dict[str, dict[int, float | None]] = {}
    for row in rows:
        by_stage.setdefault(str(row["stage"]), {})[row["update"]] = row["sigma"]
    last = max(update for own in by_stage.values() for update in own) if by_stage else 0
    return {s: [rounded(own.get(u), 4) for u in range(1, last + 1)] for s, own in sorted(by_stage.items())}


def _means(rows: Sequence[dict[str, Any]]) -> list[float | None]:
    columns = ([row[name] for row in rows if row[name] is not None] for name in METRICS)
    return [round(fmean(values), 4) if values else None for values in columns]


def similarity(result: Result) -> list[dict[str, Any]]:
    """Return the measurements of each stage in each epoch, by the names of the figures."""
    kept = result["similarity"]
    return [dict(zip(kept["names"], row, strict=True)) for row in kept["rows"]]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file without an incomplete last line, which is still being written or was cut off."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def diverged(trial: Trial, known: dict[str, Result]) -> bool:
    """Return whether a training is known to have diverged."""
    return DIVERGED in known.get(trial.name, {})


def state(trial: Trial, out: Path, known: dict[str, Result]) -> str:
    """Return the state of a training for the list."""
    if trial.name in known:
        return DIVERGED if diverged(trial, known) else "done"
    if (out / trial.name / "checkpoint").exists():
        return f"{len(read_lines(out / trial.name / 'metrics.jsonl'))} of {trial.options['epochs']} epochs"
    return "not started"
