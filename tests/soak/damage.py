"""Damages one file of a run at random, runs a command on it, and compares the result with that of the intact run.

A trial fails if the command ends with a traceback or a bare exception, with a message that does not name the file, or
with another result and no message. `python tests/soak/damage.py --trials 600` prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import random
import re
import shutil
import string
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from petra.cli.main import main
from petra.trainer import weights_hash
from petra.trainer.loop import TrainingLoop

COMMON = ("--quiet", "--threads", "1", "--device", "cpu")
IMAGES = (
    *("--model", "revnet18", "--width", "2", "--depths", "1,1", "--data", "synthetic:1x4x4:3:48", "--stages", "2"),
    *("--batch-size", "16", "--epochs", "3", "--warmup-epochs", "0", "--lr", "0.05", "--log-every", "2"),
)
TEXT = (
    *("--model", "rev-gpt", "--width", "8", "--depth", "1", "--heads", "1", "--seq-len", "8", "--stages", "2"),
    *("--batch-size", "16", "--epochs", "2", "--warmup-epochs", "0", "--optimizer", "adamw"),
)
VERSE = "so long as men can breathe or eyes can see\n" * 8
METHOD = "petra"
"""The only method of the comparisons, and so the name of the folder of each run."""
KINDS = ("bit", "byte", "digit", "letter", "truncation", "deletion")
OUTCOMES = ("traceback", "bare message", "silent difference")


@dataclass(frozen=True)
class Target:
    """A run to damage."""

    name: str
    folder: Path
    """The folder of the comparison that the run is in."""
    options: tuple[str, ...]
    """The options it was trained with."""
    commands: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """The result of a command."""

    code: int | None
    """The exit code; None if an exception left the command."""
    text: str
    """What it printed as errors and warnings."""
    found: Any
    """What it computed."""


@dataclass(frozen=True)
class Trial:
    """One damaged file and one command."""

    target: str
    file: str
    damage: str
    command: str
    failure: str | None
    """One of `OUTCOMES`; None if the trial passed."""
    reported: bool
    """The command named the file."""
    text: str

    def __str__(self) -> str:
        return f"{self.failure}: {self.command} of {self.target} with {self.damage} in {self.file}: {self.text}"


class Stopped(Exception):
    """Ends a training, as a crash would."""


def call(*arguments: object) -> tuple[int | None, str, str]:
    """Run a command in this process; return its exit code, output and errors."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code: int | None = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            code = None
    return code, out.getvalue(), errors.getvalue()


def make_targets(place: Path) -> list[Target]:
    """Train the runs: one on images and one on text, finished and not."""
    verse = place / "verse.txt"
    verse.write_text(VERSE)
    kinds = {"images": (IMAGES, ()), "text": ((*TEXT, "--data", f"text:{verse}"), ("generate",))}
    targets = []
    for kind, (options, more) in kinds.items():
        finished, unfinished = place / f"{kind}-finished", place / f"{kind}-unfinished"
        shared = ("evaluate", "resume", "init-from", "report")
        code, _, errors = call("compare", *options, *COMMON, "--methods", METHOD, "--out", finished)
        assert code == 0, errors
        targets.append(Target(kind, finished, options, (*shared, "best", "compare", "export", *more)))
        _stop_in_last_epoch(lambda out=unfinished, given=options: call("train", *given, *COMMON, "--out", out / METHOD))
        targets.append(Target(f"unfinished {kind}", unfinished, options, shared))
    return targets


def _stop_in_last_epoch(train: Callable[[], object]) -> None:
    """Train, and stop before the last epoch."""

    def install(loop: TrainingLoop) -> None:
        def stop(*_: object) -> None:
            if loop.progress.epoch + 1 == loop.settings.epochs:
                raise Stopped

        loop.trainer.executor.observers.append(stop)

    TrainingLoop.on_start.append(install)
    try:
        train()
    finally:
        TrainingLoop.on_start.remove(install)


def files_of(run: Path) -> list[Path]:
    """The files of a run, relative to its folder."""
    return sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file())


def damage(file: Path, kind: str, chance: random.Random) -> str:
    """Damage a file; return what was done."""
    content = bytearray(file.read_bytes())
    allowed = {"digit": string.digits, "letter": string.ascii_letters}.get(kind)
    places = [i for i, value in enumerate(content) if chr(value) in allowed] if allowed else range(len(content))
    if kind == "deletion" or not places:
        file.unlink()
        return "deletion"
    at = chance.choice(places)
    if kind == "truncation":
        file.write_bytes(content[:at])
        return f"truncation to {at} bytes"
    before = content[at]
    if allowed:
        content[at] = ord(chance.choice([c for c in allowed if ord(c) != before]))
    else:
        content[at] ^= 1 << chance.randrange(8) if kind == "bit" else chance.randrange(1, 256)
    file.write_bytes(content)
    return f"{kind} {at}: {bytes([before])!r} → {bytes([content[at]])!r}"


def run_command(command: str, target: Target, place: Path) -> Result:
    """Run a command on the copy of a target in `place`."""
    run, new = place / METHOD, place / "new"
    device = ("--threads", "1", "--device", "cpu")
    options = [word.replace(str(target.folder), str(place)) for word in target.options]
    arguments: Sequence[object] = {
        "evaluate": ("evaluate", run, "--json", *device),
        "best": ("evaluate", run, "--json", "--weights", "best", *device),
        "generate": ("generate", run, "--max-new-tokens", 8, "--temperature", 0, *device),
        "resume": ("train", "--resume", *COMMON, "--out", run),
        "compare": ("compare", *options, *COMMON, "--methods", METHOD, "--resume", "--out", place),
        "init-from": ("train", *options, *COMMON, "--epochs", 1, "--max-steps", 1, "--init-from", run, "--out", new),
        "export": ("export", run, "--out", new),
        "report": ("report", run, "--out", place / "report.html"),
    }[command]
    code, out, errors = call(*arguments)
    found: Any = {"said": _without_figures(out, place, timed=command in ("resume", "init-from"))}
    if code == 0:
        found |= _written(command, run, new, place)
    warned = "".join(line + "\n" for line in out.splitlines() if command == "report")
    return Result(code, errors + warned, found)


def _without_figures(text: str, place: Path, timed: bool) -> str:
    text = text.replace(str(place), "PLACE")
    return re.sub(r"[\d.]+ samples/s", "N samples/s", text) if timed else text


def _written(command: str, run: Path, new: Path, place: Path) -> dict[str, Any]:
    """What a command has written, without what depends on the clock."""
    if command == "export":
        return {"weights": weights_hash(dict(sorted(load_file(new).items())))}  # metadata has no fixed order
    if command == "init-from":
        return {"weights": json.loads((new / "summary.json").read_text())["weights_sha256"]}
    if command == "report":
        page = (place / "report.html").read_text()
        return {"page": re.sub(r"Written[^<]*|\d{4}-\d\d-\d\d[^<]*", "", page.replace(str(place), "PLACE"))}
    if command not in ("resume", "compare"):
        return {}
    names = ("config.json", "network.json", "vocabulary.json", "weights.safetensors", "best.safetensors")
    found: dict[str, Any] = {name: _hash(run / name) for name in names if (run / name).exists()}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found["metrics"] = [_untimed(record) for record in records]
    return found | {"summary": _untimed(json.loads((run / "summary.json").read_text()))}


def _untimed(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("seconds", "samples_per_second")}


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


class Attack:
    """Trials on the same runs.

    Args:
        place: An empty folder for the runs and their copies.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self.targets = make_targets(place)
        self._intact: dict[tuple[str, str], Result] = {}

    def trial(self, chance: random.Random) -> Trial:
        """Damage one file of one run, and run one command."""
        target = chance.choice(self.targets)
        command = chance.choice(target.commands)
        file = chance.choice(files_of(target.folder / METHOD))
        return self.check(target, command, file, chance.choice(KINDS), chance)

    def check(self, target: Target, command: str, file: Path, kind: str, chance: random.Random) -> Trial:
        """Damage a file of a run, run a command, and compare its result with that of the intact run."""
        expected = self._result_of_intact(target, command)
        copy = self._copy(target)
        done = damage(copy / METHOD / file, kind, chance)
        result = run_command(command, target, copy)
        shutil.rmtree(copy)
        reported = file.name in result.text
        text = result.text.replace(str(copy), "…").strip()
        return Trial(target.name, str(file), done, command, _judge(result, expected, reported), reported, text)

    def _result_of_intact(self, target: Target, command: str) -> Result:
        key = (target.name, command)
        if key not in self._intact:
            copy = self._copy(target)
            self._intact[key] = result = run_command(command, target, copy)
            shutil.rmtree(copy)
            assert result.code == 0 or target.name.startswith("unfinished"), result.text
        return self._intact[key]

    def _copy(self, target: Target) -> Path:
        copy = self._place / "copy"  # the same path for all: messages and pages contain it
        shutil.rmtree(copy, ignore_errors=True)
        return shutil.copytree(target.folder, copy)


def _judge(result: Result, expected: Result, reported: bool) -> str | None:
    if result.code is None or "Traceback" in result.text or re.search(r"error: \w+(Error|Exception):", result.text):
        return "traceback"
    if result.code == expected.code and result.found == expected.found:
        return None
    if reported:
        return None
    return "silent difference" if result.code == 0 else "bare message"


def attack(seed: int, trials: int) -> list[Trial]:
    """Run trials in a temporary folder; return those that failed."""
    return [trial for trial in all_trials(seed, trials) if trial.failure is not None]


def all_trials(seed: int, trials: int) -> Iterator[Trial]:
    """Run trials in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="petra-damage-") as place:
        chance, one = random.Random(seed), Attack(Path(place))
        for _ in range(trials):
            yield one.trial(chance)


def table(trials: Sequence[Trial]) -> str:
    """Return the numbers of trials and failures of each command."""
    commands = sorted({trial.command for trial in trials})
    lines = ["| command | trials | reported | " + " | ".join(OUTCOMES) + " |", "| --- " * (len(OUTCOMES) + 3) + "|"]
    for command in [*commands, "all"]:
        own = [trial for trial in trials if command in ("all", trial.command)]
        counts = Counter(trial.failure for trial in own)
        cells = [len(own), sum(trial.reported for trial in own), *(counts[outcome] for outcome in OUTCOMES)]
        lines.append(f"| {command} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end earlier, after this time")
    given = parser.parse_args()
    end, done = time.monotonic() + given.seconds, []
    for one in all_trials(given.seed, given.trials):
        done.append(one)
        if one.failure is not None:
            print(one, flush=True)
        if time.monotonic() > end:
            break
    print(table(done))
    sys.exit(any(one.failure is not None for one in done))
