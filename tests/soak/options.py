"""Calls commands with random options, and checks that each ends with a result or with one line that says what is wrong.

Nothing is trained: a training ends before its first micro-batch, and no ranks are started.
`python tests/soak/options.py --trials 500` prints the calls that ended with a traceback, a bare exception or several
lines.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from petra.cli.parser import COMMANDS, build_parser
from petra.runs.run import Run
from petra.trainer.interrupts import Interrupted
from soak.damage import COMMON, TEXT, VERSE, call

RUNS = "{tmp}/run {tmp} {tmp}/verse.txt {tmp}/none"
SMALL = "1 2 3 4 8 0 -1 x 2,2 1.5"
SIZES = (
    "width depth depths heads patch batch_size vocab_size seq_len image_size max_new_tokens epochs workers threads "
    "ranks replicas stages ticks max_steps trace accumulate image"
)
"""Options whose large values would take much time or memory."""
JUNK = "0 1 2 3 -1 0.5 1e-3 1e9 nan inf -inf x 1,2 a=b é None 999999999999999999999999999999"
WORDS = {
    "folder": RUNS,
    "folders": RUNS,
    "model": "revnet18 rev-gpt resnet18 rev-vit-small irevnet nope a:b petra:nope os:getcwd",
    "data": "synthetic:1x8x8:4:40 digits text:{tmp}/verse.txt bytes:{tmp}/verse.txt tokens:{tmp} nowhere synthetic:1x8 "
    "synthetic:0x0x0:1 synthetic:1x8x8:0:0 {tmp} text: text:{tmp} text:{tmp}/none",
    "out": "{tmp}/new/{n} {tmp}/new/{n}.png {tmp}/new/{n}.html {tmp}/verse.txt {tmp}/run {tmp}/verse.txt/x",
    "config": "{tmp}/run/config.json {tmp}/verse.txt {tmp}/none.json {tmp} {tmp}/bad.json {tmp}/bad.toml",
    "init_from": "{tmp}/run {tmp}/run/weights.safetensors {tmp}/verse.txt {tmp}/none",
    "device": "cpu cuda cuda:99 x meta",
    "schedule": "low-staleness 1f1b gpipe interleaved:2 interleaved:0 flush:2 flush:x 2,1 1,0 cosine x",
    "methods": "petra backprop backprop,petra nope delayed",
    "corrections": "predict predict,shrink:0.9 shrink:x nope inertia:-1 ,",
    "optimizer": "sgd adamw muon adagrad torch.optim.RMSprop nope a:b os:getcwd",
    "set": "depth=2 x=y x = width=a width=-1 dropout=2",
    "set_optimizer": "alpha=0.9 lr=x x=1 x",
    "name": "low-staleness 1f1b lock-step 2,1,0 -1 nope digits petra",
    "placement": "0,1 1,0 0 -1 0,5 x",
}
"""Values of options by name; others get `JUNK`."""
NETWORK = ("--model", "revnet18", "--width", "2", "--depths", "1,1", "--data", "synthetic:1x8x8:4:40")


@dataclass(frozen=True)
class Call:
    """One call of a command."""

    arguments: tuple[str, ...]
    code: int | None
    errors: str
    failure: str | None

    def __str__(self) -> str:
        return f"{self.failure}: petra {' '.join(map(repr, self.arguments))}: {self.errors}"


def random_arguments(command: str, chance: random.Random, place: Path, number: int) -> list[str]:
    """Return random arguments of a command."""
    parser = build_parser().commands.parsers[command]
    parser.add_command_options()
    words = [command]
    names = {option for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        if action.dest == "help" or (action.option_strings and chance.random() > (0.8 if action.required else 0.08)):
            continue
        if action.option_strings:
            words.append(chance.choice(action.option_strings))
        if action.nargs != 0:
            several = chance.randint(1, 3) if action.nargs == "+" else 1
            words += [_value(action, chance) for _ in range(several)]
    if "--data" in names and chance.random() < 0.7:
        words += NETWORK
    elif "--depths" in names:
        words += NETWORK[2:6]  # the default network takes long
    if "--no-run" in names:
        words.append("--no-run")
    return [word.format(tmp=place, n=number) if "{tmp}" in word else word for word in words]


def _value(action: argparse.Action, chance: random.Random) -> str:
    if action.choices and chance.random() < 0.8:
        return str(chance.choice(list(action.choices)))
    words = WORDS.get(action.dest, SMALL if action.dest in SIZES.split() else JUNK)
    return chance.choice([*words.split(), ""])


def check(arguments: list[str]) -> Call:
    """Call a command, and judge how it ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code, _, errors = call(*arguments)
    return Call(tuple(arguments), code, errors, _judge(code, errors))


def _judge(code: int | None, errors: str) -> str | None:
    if code is None or "Traceback" in errors or re.search(r"error: \w+(Error|Exception):", errors):
        return "traceback"
    if code not in (0, 1, 2, 130):
        return f"exit code {code}"
    said = [line for line in errors.splitlines() if "error:" in line]
    if code == 2 and len(said) != 1:
        return f"{len(said)} errors"
    return None


@contextlib.contextmanager
def without_training(place: Path) -> Iterator[None]:
    """Work in a folder, and end every training before it begins."""

    def stop(run: Run) -> None:
        run.close()
        raise Interrupted("stopped before the first micro-batch")

    here = os.getcwd()
    started = mock.Mock(returncode=0)
    with (
        mock.patch.object(Run, "__call__", stop),
        mock.patch("petra.cli.train.launch_ranks", return_value=0),
        mock.patch("petra.cli.doctor.subprocess.run", return_value=started),
    ):
        os.chdir(place)
        try:
            yield
        finally:
            os.chdir(here)


def prepare(place: Path) -> None:
    """Write the files that options name."""
    (place / "verse.txt").write_text(VERSE)
    (place / "bad.json").write_text('{"epochs": ')
    (place / "bad.toml").write_bytes(b"\xff = 1")
    code, _, errors = call("train", *TEXT, *COMMON, "--data", f"text:{place / 'verse.txt'}", "--out", place / "run")
    assert code == 0, errors


def all_calls(seed: int, trials: int) -> Iterator[Call]:
    """Call commands with random options in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="petra-options-") as folder:
        place, chance = Path(folder), random.Random(seed)
        prepare(place)
        with without_training(place):
            names = [chance.choice(list(COMMANDS)) for _ in range(trials)]
            for n, name in enumerate(names):
                yield check(random_arguments(name, chance, place, n))


def attack(seed: int, trials: int) -> list[Call]:
    """Call commands with random options; return the calls that failed."""
    return [one for one in all_calls(seed, trials) if one.failure is not None]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end earlier, after this time")
    given = parser.parse_args()
    end, done = time.monotonic() + given.seconds, []
    for one in all_calls(given.seed, given.trials):
        done.append(one)
        if one.failure is not None:
            print(one, flush=True)
        if time.monotonic() > end:
            break
    print(f"{len(done)} calls, exit codes {dict(Counter(one.code for one in done))}")
    sys.exit(any(one.failure is not None for one in done))
