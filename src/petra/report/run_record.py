"""The records in the folder of a run. A file that is missing or damaged is noted, and the rest is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from petra.measure.timeline import Trace
from petra.runs.file_hashes import CHANGED, is_unchanged
from petra.runs.run_folder import (
    CHECKPOINTS,
    CONFIG,
    FIDELITY,
    FIDELITY_SUMMARY,
    METRICS,
    SUMMARY,
    TRACE,
    written_by_fit,
)

_MOST_STAGES = 6


@dataclass
class RunRecord:
    """Everything that a report shows of a run."""

    name: str
    """The name of the run in the report."""
    folder: Path
    """Its folder."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The contents of `config.json`."""
    metrics: Sequence[Mapping[str, Any]] = ()
    """The records of `metrics.jsonl`."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """The contents of `summary.json`; empty if the run has not finished."""
    fidelity: Sequence[Mapping[str, Any]] = ()
    """The measurements of `petra fidelity`."""
    every: int | None = None
    """The number of updates between two of these measurements."""
    trace: Trace | None = None
    """The timeline of `--trace`."""
    command: str = ""
    """The command that trains such a run."""
    problems: list[str] = field(default_factory=list)
    """Files that are missing or damaged."""

    @property
    def method(self) -> str:
        """The name of the method, or an empty string."""
        return str(self.config.get("method") or self.summary.get("method") or "")

    @property
    def stages(self) -> int:
        """The number of stages; 0 if it is not known."""
        for found in (self.summary.get("stages"), self.config.get("stages")):
            if isinstance(found, list):
                return len(found)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
        return 0

    @property
    def finished(self) -> bool:
        """The run has a summary."""
        return bool(self.summary)

    def curve(self, y: str, x: str = "epoch") -> list[tuple[float | None, float | None]]:
        """Return a metric over epochs, steps or seconds.

        Args:
            y: The name of the metric.
            x: The name of the other metric.

        Returns:
            A point for each record that has both, with None for a value that is not finite.
        """
        records = [r for r in self.metrics if r.get(x) is not None and y in r]
        logged = [r for r in records if "test_loss" not in r]
        if y.startswith("train_") and len(logged) > 1:  # others are means over a whole epoch
            records = logged
        return [(number(r[x]), number(r[y])) for r in records]

    def last(self, name: str) -> float | None:
        """Return the last value of a metric.

        Args:
            name: The name of the metric.

        Returns:
            The value, or None if there is none.
        """
        return next((v for r in reversed(self.metrics) if (v := number(r.get(name))) is not None), None)


def number(value: object) -> float | None:
    """Return a finite number as float; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) else None  # type: ignore[arg-type]


def numbers(values: object) -> list[float | None]:
    """Return the finite numbers of a list, with None for what is not; an empty list if it is not a list."""
    return [number(value) for value in values] if isinstance(values, list) else []


def some_stages(stages: Sequence[int]) -> list[int]:
    """Return all stages, or of many the first, the last and some between them.

    Args:
        stages: The stages.

    Returns:
        As many as the lines of one chart can be told apart.
    """
    last = len(stages) - 1
    if last < _MOST_STAGES:
        return list(stages)
    return [stages[round(i * last / (_MOST_STAGES - 1))] for i in range(_MOST_STAGES)]


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of runs: those given, and for a folder of several runs, each of them.

    Args:
        paths: Folders of runs, or folders such as that of `petra compare`.

    Returns:
        The folders of the runs.

    Raises:
        ValueError: If there is no run in one of the folders.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise ValueError(f"{path} {what}: give the folder of a run, as `petra train --out` writes it")
        inner = [path] if holds_run(path) else _runs_in(path)
        if not inner:
            raise ValueError(f"{path} holds no run: give the folder of one, as `petra train --out` writes it")
        found += inner
    return found


def _runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder, those of a comparison in its order."""
    try:
        order = [str(one["method"]) for one in json.loads((folder / "comparison.json").read_text())]
    except (OSError, ValueError, TypeError, KeyError):
        order = []
    found = sorted(path for path in folder.iterdir() if holds_run(path))
    return sorted(found, key=lambda path: order.index(path.name) if path.name in order else len(order))


def holds_run(folder: Path) -> bool:
    """Return whether a folder has files of a run."""
    return folder.is_dir() and any((folder / name).exists() for name in (CONFIG, METRICS, SUMMARY, CHECKPOINTS))


def read_run(folder: Path, name: str, command: Callable[[Mapping[str, Any]], str] = lambda config: "") -> RunRecord:
    """Read the files of a run.

    Args:
        folder: The folder of the run.
        name: Its name in the report.
        command: Returns the command that trains a run with such a `config.json`.

    Returns:
        The data that could be read; `problems` lists the rest.

    Raises:
        ValueError: If there is nothing to report.
    """
    record = RunRecord(name, folder)
    of_fit = written_by_fit(folder)
    record.config = _object(record, CONFIG, "" if of_fit else "{} is missing")
    record.metrics = _lines(record, METRICS)
    remedy = "fit(..., resume=True) continues it" if of_fit else "{} is missing"
    record.summary = _object(record, SUMMARY, f"the run has not finished, or it was stopped: {remedy}")
    record.fidelity = [row for row in _lines(record, FIDELITY, optional=True) if "stage" in row]
    every = _object(record, FIDELITY_SUMMARY, "").get("every")
    record.every = every if isinstance(every, int) else None
    if (folder / TRACE).exists():
        try:
            if _check(record, TRACE, (folder / TRACE).read_bytes()):
                record.trace = Trace.load(folder / TRACE)
        except (ValueError, OSError) as error:
            record.problems.append(f"{TRACE} is damaged ({error}): there is no timeline")
    if not (record.config or record.metrics or record.summary):
        raise ValueError(f"nothing in {folder} can be read: {'; '.join(record.problems)}")
    recorded = record.summary.get("command")
    try:
        record.command = recorded if isinstance(recorded, str) else command(record.config) if record.config else ""
        if record.command and not isinstance(recorded, str) and (number(record.summary.get("ranks")) or 1) > 1:
            record.command += f" --ranks {record.summary['ranks']}"  # not in config.json: it does not affect weights
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        record.problems.append(f"{CONFIG} is of another version of Petra ({error}): the command is not known")
    return record


def _check(record: RunRecord, file: str, content: bytes) -> bool:
    """Note a file that is not what the run wrote, and return False."""
    try:
        if is_unchanged(record.folder, file, content):
            return True
        record.problems.append(f"{file} {CHANGED}")
        return False
    except ValueError as error:  # the hashes are damaged
        if str(error) not in record.problems:
            record.problems.append(str(error))
        return True


def _object(record: RunRecord, file: str, if_missing: str = "{} is missing") -> dict[str, Any]:
    path = record.folder / file
    if not path.exists():
        if if_missing:
            record.problems.append(if_missing.format(file))
        return {}
    try:
        content = path.read_bytes()
        if not _check(record, file, content):
            return {}
        found = json.loads(content.decode())
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
        return found
    except (ValueError, OSError, RecursionError) as error:
        record.problems.append(f"{file} is damaged ({error})")
        return {}


def _lines(record: RunRecord, file: str, optional: bool = False) -> list[dict[str, Any]]:
    path = record.folder / file
    if not path.exists():
        if not optional:
            record.problems.append(f"{file} is missing")
        return []
    try:
        content = path.read_bytes()
    except OSError as error:
        record.problems.append(f"{file} cannot be read ({error.strerror})")
        return []
    _check(record, file, content)
    lines = content.decode(errors="replace").splitlines()
    found, damaged = [], []
    for i, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError("not an object")
            found.append(value)
        except (ValueError, RecursionError):
            damaged.append(str(i))
    if damaged:
        which = f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines, the first of them {damaged[0]}"
        record.problems.append(f"{file} is damaged in {which}: these are left out")
    return found
