"""The experiments of the PETRA and Features Replay papers on CIFAR-10, several trainings at a time on one GPU.

    python experiments/cifar10/run.py table2 --data path/to/cifar10 --jobs 6 -- --autocast bf16 --channels-last
    python experiments/cifar10/run.py --list                      # plans, their trainings and how far they are
    python experiments/cifar10/run.py table2 --summarise          # table and figure of what is finished
    python experiments/cifar10/run.py table2 --check 2 --data …   # are results as kept? first epochs, once more
    python experiments/cifar10/run.py --smoke --jobs 2            # all plans, tiny, on digits and the CPU

Each training is a `petra train` (or `petra fidelity`) in a folder of its own under --out, to which all that follows --
is given. One that is finished or has diverged is not made again, one that was begun goes on from its last checkpoint:
give the same command until nothing is left. Results go into --results, which is all that has to be kept. The exit code
is 0 if all trainings have come to an end, 1 if some failed, 2 for bad input and 3 if some are left. Times of --list are
estimates, not measurements. --check trains under --out/check and changes no results; its exit code is 0 if all is as it
was kept, to four digits. Trainings with --benchmark need not be, nor those on another GPU or with another PyTorch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import cache
import check
import figures
import jobs
import results
from plans import PLANS
from replay import replay
from tables import TABLES
from trials import Trial

HERE = Path(__file__).parent
CHECKS = "check"
"""Folder under --out of trainings that are made again to be compared."""


def options() -> tuple[argparse.Namespace, list[str]]:
    """Ours, and those that go to every training."""
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", metavar="PLAN", help=f"any of {', '.join(PLANS)} (default: all)")
    parser.add_argument("--data", help="folder of CIFAR-10; parquet is decoded once, into --out")
    parser.add_argument("--out", type=Path, default=Path("runs/cifar10"), help="of trainings: %(default)s")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of results, tables and figures")
    parser.add_argument("--jobs", type=int, default=4, help="trainings at a time (default %(default)s)")
    parser.add_argument("--mps", action="store_true", help="share the GPU through CUDA's Multi-Process Service")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop all with a checkpoint after so long")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of trainings, like '*-s0'")
    parser.add_argument("--epochs", type=int, help="of the plan replay, for all its networks (default: see its README)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--check",
        type=int,
        metavar="EPOCHS",
        help="train so many epochs of what is in --results once more, and say whether each is as it was kept",
    )
    parser.add_argument("--list", action="store_true", help="say what there is to do, and do nothing")
    parser.add_argument("--summarise", action="store_true", help="only make tables and figures")
    parser.add_argument("--smoke", action="store_true", help="tiny trainings on digits, in folders of their own")
    given = parser.parse_args(arguments[:split])
    for plan in given.plans:
        if plan not in PLANS:
            parser.error(f"there is no plan {plan!r}: choose from {', '.join(PLANS)}")
    given.plans = given.plans or list(PLANS)
    if given.epochs is not None and "replay" not in given.plans:
        parser.error("--epochs is of the plan replay: leave it out, the others have epochs of their own")
    if given.epochs is not None and given.epochs < 1:
        parser.error(f"--epochs is {given.epochs}: give 1 or more")
    PLANS["replay"] = replay(given.epochs)  # the names say how many, so that others are not taken for them
    if given.smoke:
        given.device, given.out = "cpu", given.out.with_name(given.out.name + "_smoke")
        given.results = given.out / "results"
    elif given.data is None and not (given.list or given.summarise):
        parser.error("--data is missing: give the folder of CIFAR-10")
    elif given.data is not None and not Path(given.data).is_dir():
        parser.error(f"--data is {given.data}, which is no folder: give that of CIFAR-10")
    for name, folder in (("out", given.out), ("results", given.results)):
        if folder.exists() and not folder.is_dir():
            parser.error(f"--{name} is {folder}, which is no folder: give another")
    try:
        results.read(given.results)
    except ValueError as error:
        parser.error(f"{given.results / results.FILE} is damaged ({error}): mend it, or give other --results")
    if given.check is not None and (given.list or given.summarise):
        parser.error("--check trains: give it without --list and --summarise")
    if given.check is not None and given.check < 1:
        parser.error(f"--check is {given.check}: give 1 epoch or more")
    if given.check is not None and not any(trial.name in results.read(given.results) for trial in selected(given)):
        parser.error(f"--check finds none of these trainings in {given.results}: there is nothing to compare with")
    if given.jobs < 1:
        parser.error(f"--jobs is {given.jobs}: give 1 or more")
    if not selected(given):
        parser.error(f"no training of {', '.join(given.plans)} is called {' or '.join(given.only)}: see --list")
    return given, arguments[split + 1 :]


def selected(given: argparse.Namespace) -> list[Trial]:
    """The trainings that were asked for, each once."""
    found = {t.name: t for plan in given.plans for t in PLANS[plan] if any(fnmatch(t.name, p) for p in given.only)}
    return [trial.smoke() if given.smoke else trial for trial in found.values()]


def job(trial: Trial, given: argparse.Namespace, data: str | None, extra: list[str]) -> jobs.Job:
    """The command of a training, which goes on where it was if it has been begun."""
    folder = given.out / trial.name
    command = [sys.executable, "-m", "petra", *trial.arguments(), "--device", given.device, "--out", str(folder)]
    command += ["--data", data] if data is not None else []
    return jobs.Job(trial.name, [*command, "--resume", "--quiet", *extra], folder)


def checked(trial: Trial, given: argparse.Namespace, data: str | None, extra: list[str]) -> jobs.Job:
    """The same from the start in another folder, until it has as many epochs as are to be compared."""
    made = job(trial, argparse.Namespace(**{**vars(given), "out": given.out / CHECKS}), data, extra)
    shutil.rmtree(made.folder, ignore_errors=True)  # of an earlier check
    return replace(made, enough=lambda folder: check.has_epochs(folder, given.check))


def show(given: argparse.Namespace, trials: list[Trial]) -> None:
    """What there is to do, and about how long it takes."""
    known = results.read(given.results)
    wanted = {trial.name for trial in trials}
    seen: set[str] = set()
    for plan in given.plans:
        own = [t for t in PLANS[plan] if t.name in wanted]
        left = [t for t in own if t.name not in known and t.name not in seen]
        print(f"{plan}: {len(own)} trainings; estimate for those to be made: {sum(t.seconds for t in left):.0f} s")
        for t in own:
            shared = ", see above" if t.name in seen else ""
            print(f"  {t.name:60} {t.seconds:6.0f} s  {results.state(t, given.out, known)}{shared}")
        seen |= {t.name for t in own}


def summarise(given: argparse.Namespace, trials: list[Trial]) -> dict[str, results.Result]:
    """Keep what has come to an end; write the table and, with matplotlib, the figures of each plan."""
    known = results.collect(trials, given.out, given.results)
    for plan in given.plans:
        own, folder = PLANS[plan], given.results
        if plan == "replay" and given.epochs is not None:  # not the table and the figures that the README shows
            folder /= f"epochs-{given.epochs}"
        missing = [t.name for t in own if t.name not in known]
        if len(missing) == len(own):  # what there is may be of other epochs
            print(f"\n{plan}: 0 of {len(own)} trainings, nothing is written")
            continue
        table = TABLES[plan](known)
        said = [f"{t.name}: {known[t.name][results.DIVERGED]}" for t in own if results.diverged(t, known)]
        table += "\n\nDiverged:\n\n- " + "\n- ".join(said) if said else ""
        note = f"\n\nNot run yet: {', '.join(missing)}.\n" if missing else "\n"
        folder.mkdir(exist_ok=True)
        (folder / f"{plan}.md").write_text(table + note)
        where = ", ".join([f"{plan}.md", *figures.draw(plan, known, folder)])
        ended = f"{len(own) - len(missing)} of {len(own)} trainings"
        print(f"\n{plan}: {ended}; in {folder}: {where}\n\n{table}", flush=True)
    return known


def train(given: argparse.Namespace, todo: list[jobs.Job], began: float) -> dict[str, str]:
    """Carry out as much as there is time for; what failed, and why."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // given.jobs)))
    with jobs.shared_gpu(given.out, given.mps):
        limit = None if given.limit is None else given.limit - (time.monotonic() - began)
        return jobs.carry_out(todo, given.jobs, limit).failed


def main() -> int:
    """Train what is left, and summarise; or check what was kept."""
    began = time.monotonic()
    given, extra = options()
    trials = selected(given)
    if given.list:
        try:
            show(given, trials)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, `head` say, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    failed: dict[str, str] = {}
    if not given.summarise:
        given.out.mkdir(parents=True, exist_ok=True)
        try:
            data = None if given.smoke else cache.decoded(given.data, given.out)
        except (ValueError, OSError) as error:
            print(f"run.py: error: {error}", file=sys.stderr)
            return 2
        if given.check is not None:
            known = results.read(given.results)
            trials = [trial for trial in trials if trial.name in known]
            train(given, [checked(trial, given, data, extra) for trial in trials], began)
            return 1 if check.report(trials, given.out / CHECKS, known, given.check) else 0
        known = results.collect(trials, given.out, given.results)
        failed = train(given, [job(t, given, data, extra) for t in trials if t.name not in known], began)
    known = summarise(given, trials)
    for name, why in failed.items():
        print(f"FAILED {name}: {why}", file=sys.stderr)
    return 1 if failed else 3 if any(trial.name not in known for trial in trials) else 0


if __name__ == "__main__":
    sys.exit(main())
