"""`python -m soak` trains small jobs with random faults, and compares their weights with those of unbroken runs.

It prints every fault with its time, and at the end a table. A trial is drawn from the seed and its number:
`--seed 3 --only 17` does trial 3:17 again. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path

from soak.expectations import Outcome
from soak.faults import FAULTS
from soak.jobs import JOBS
from soak.trials import Soak, Trial


def main(arguments: Sequence[str] | None = None) -> int:
    """Run trials until time is up, print the table, and return 1 if anything failed."""
    options = _parse(arguments)
    folder = Path(tempfile.mkdtemp(prefix="petra-soak-"))
    print(f"seed {options.seed}, {options.seconds:.0f} s, runs in {folder}", flush=True)
    soak = Soak(folder, options.timeout, _print, options.arguments)
    trials = run_trials(soak, options)
    print(table(trials))
    failed = [trial for trial in trials if trial.failed]
    for trial in failed:
        print(f"trial {trial.seed}:{trial.number} ({trial.job.name}) failed: {'; '.join(trial.problems)}")
    damaged = _damage(options.seed, options.damage)
    print(f"{len(trials)} trials, {len(failed) + damaged} failures")
    return 1 if failed or damaged else 0


def run_trials(soak: Soak, options: argparse.Namespace) -> list[Trial]:
    """Do trials until time is up, some of them at the same time."""
    deadline, numbers, done, lock = time.monotonic() + options.seconds, count(), list[Trial](), threading.Lock()

    def work() -> None:
        while time.monotonic() < deadline:
            with lock:
                number = next(numbers)
            if options.trials is not None and number >= options.trials:
                return
            if options.only is not None and (number := options.only) in [trial.number for trial in done]:
                return
            trial = Trial.draw(options.seed, number, options.timeout, options.jobs, options.faults)
            with lock:
                done.append(trial)
            soak.run(trial)

    with ThreadPoolExecutor(options.parallel) as pool:
        for future in [pool.submit(work) for _ in range(options.parallel if options.only is None else 1)]:
            future.result()
    return done


def table(trials: Sequence[Trial]) -> str:
    """Return what happened after every kind of fault."""
    lines = ["| fault | trials | went on | ended and resumed | failures | seconds to the end, median (largest) |"]
    lines.append("|" + " --- |" * 6)
    events = [(event, trial.failed) for trial in trials for event in trial.events]
    events = [(event, failed) for event, failed in events if event.verdict.outcome is not Outcome.MISSED]
    for kind in [*FAULTS, "all"]:
        own = [(event, failed) for event, failed in events if kind in ("all", event.fault.kind)]
        if not own:
            continue
        outcomes = [event.verdict.outcome for event, failed in own if not failed]
        ends = [event.seconds for event, _ in own if event.verdict.outcome is Outcome.ENDED]
        took = f"{statistics.median(ends):.1f} ({max(ends):.1f})" if ends else ""
        cells = [len(own), outcomes.count(Outcome.RECOVERED), outcomes.count(Outcome.ENDED)]
        failures = sum(failed for _, failed in own)
        lines.append(f"| {kind} | {' | '.join(map(str, cells))} | {failures} | {took} |")
    return "\n".join(lines)


def _damage(seed: int, trials: int) -> int:
    """Damage files of finished runs, if there is something that does; return the number of failures."""
    if not trials or find_spec("soak.damage") is None:
        return 0
    failed = import_module("soak.damage").attack(seed, trials)
    for trial in failed:
        print(f"damage, seed {seed}: {trial}")
    print(f"{trials} damaged files, {len(failed)} failures")
    return len(failed)


def _print(line: str) -> None:
    print(line, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="start trials for this long (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all faults (default: 0)")
    parser.add_argument("--trials", type=int, metavar="N", help="end after this many, also before time is up")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="do only the trial with this number")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="trials at the same time (default: 1)")
    parser.add_argument("--timeout", type=float, default=10, help="--timeout of the jobs (default: 10)")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS, metavar="JOB", help="only these jobs")
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS, metavar="FAULT", help="only these")
    parser.add_argument(
        "--damage", type=int, default=100, metavar="N", help="files to damage at the end (default: 100)"
    )
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENT", help="more arguments of all jobs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
