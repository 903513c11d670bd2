"""The experiments of the PETRA and Features Replay papers on CIFAR-10, several trainings at a time on one GPU.

    python experiments/cifar10/run.py table2 --data path/to/cifar10 --jobs 6 -- --autocast bf16 --channels-last
    python experiments/cifar10/run.py --list                      # plans, their trainings and their state
    python experiments/cifar10/run.py table2 --summarise          # table and figure of the finished trainings
    python experiments/cifar10/run.py table2 --check 2 --data …   # train two epochs again, compare with the results
    python experiments/cifar10/run.py --smoke --jobs 2            # all plans, tiny, on digits and the CPU

Each training is a `petra train` (or `petra fidelity`) in its own folder under --out. Arguments after -- go to every
training. Trainings that have finished or diverged are not repeated, and interrupted ones resume from their last
checkpoint: repeat the same command until nothing is left. Results go to --results, which is all you need to keep. The
exit code is 0 if all trainings have ended, 1 if some failed, 2 for bad input and 3 if some are left. The times of
--list are estimates, not measurements. --check trains under --out/check and changes no results; its exit code is 0 if
everything agrees with the stored results to four digits. Trainings with --cudnn-benchmark may differ, as may those on
another GPU or with another version of PyTorch.
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
"""Folder under --out of trainings that are repeated for --check."""


def options() -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this script, and those that go to every training."""
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", metavar="PLAN", help=f"any of {', '.join(PLANS)} (default: all)")
    parser.add_argument("--data", help="folder of CIFAR-10; parquet is decoded once, into --out")
    parser.add_argument("--out", type=Path, default=Path("runs/cifar10"), help="folder of the trainings: %(default)s")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of results, tables and figures")
    parser.add_argument("--jobs", type=int, default=4, help="trainings at a time (default %(default)s)")
    parser.add_argument("--mps", action="store_true", help="share the GPU through CUDA's Multi-Process Service")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop all with a checkpoint after this time")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of trainings, like '*-s0'")
    parser.add_argument("--epochs", type=int, help="epochs of all networks in the plan replay (default: see README)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--check",
        type=int,
        metavar="EPOCHS",
        help="train this many epochs of the trainings in --results again and compare them with the stored values",
    )
    parser.add_argument("--list", action="store_true", help="only list the trainings and their state")
    parser.add_argument("--summarise", action="store_true", help="only write tables and figures")
    parser.add_argument("--smoke", action="store_true", help="tiny trainings on digits, in separate folders")
    given = parser.parse_args(arguments[:split])
    for plan in given.plans:
        if plan not in PLANS:
            parser.error(f"there is no plan {plan!r}: choose from {', '.join(PLANS)}")
    given.plans = given.plans or list(PLANS)
    if given.epochs is not None and "replay" not in given.plans:
        parser.error("--epochs is for the plan replay only, the other plans have fixed epochs: leave it out")
    if given.epochs is not None and given.epochs < 1:
        parser.error(f"--epochs is {given.epochs}: give 1 or more")
    PLANS["replay"] = replay(given.epochs)  # the names contain the epochs, so that they are not confused with others
    if given.smoke:
        given.device, given.out = "cpu", given.out.with_name(given.out.name + "_smoke")
        given.results = given.out / "results"
    elif given.data is None and not (given.list or given.summarise):
        parser.error("--data is missing: give the folder of CIFAR-10")
    elif given.data is not None and not Path(given.data).is_dir():
        parser.error(f"--data is {given.data}, which is not a folder: give the folder of CIFAR-10")
    for name, folder in (("out", given.out), ("results", given.results)):
        if folder.exists() and not folder.is_dir():
            parser.error(f"--{name} is {folder}, which is not a folder: give another")
    try:
        results.read(given.results)
    except ValueError as error:
        parser.error(f"{given.results / results.FILE} is damaged ({error}): fix it, or give another --results")
    if given.check is not None and (given.list or given.summarise):
        parser.error("--check trains: give it without --list and --summarise")
    if given.check is not None and given.check < 1:
        parser.error(f"--check is {given.check}: give 1 epoch or more")
    if given.check is not None and not any(trial.name in results.read(given.results) for trial in selected(given)):
        parser.error(f"--check finds no results of these trainings in {given.results}: give the folder that has them")
    if given.jobs < 1:
        parser.error(f"--jobs is {given.jobs}: give 1 or more")
    if not selected(given):
        parser.error(f"no training of {', '.join(given.plans)} is called {' or '.join(given.only)}: see --list")
    return given, arguments[split + 1 :]


def selected(given: argparse.Namespace) -> list[Trial]:
    """Return the selected trainings, each once."""
    found = {t.name: t for plan in given.plans for t in PLANS[plan] if any(fnmatch(t.name, p) for p in given.only)}
    return [trial.smoke() if given.smoke else trial for trial in found.values()]


def job(trial: Trial, given: argparse.Namespace, data: str | None, extra: list[str]) -> jobs.Job:
    """Return the job of a training, which resumes from its checkpoint if there is one."""
    folder = given.out / trial.name
    command = [sys.executable, "-m", "petra", *trial.arguments(), "--device", given.device, "--out", str(folder)]
    command += ["--data", data] if data is not None else []
    return jobs.Job(trial.name, [*command, "--resume", "--quiet", *extra], folder)


def checked(trial: Trial, given: argparse.Namespace, data: str | None, extra: list[str]) -> jobs.Job:
    """Return the same job from the start in another folder, until it has the epochs to be compared."""
    made = job(trial, argparse.Namespace(**{**vars(given), "out": given.out / CHECKS}), data, extra)
    shutil.rmtree(made.folder, ignore_errors=True)  # of an earlier check
    return replace(made, enough=lambda folder: check.has_epochs(folder, given.check))


def show(given: argparse.Namespace, trials: list[Trial]) -> None:
    """Print the trainings of each plan, their state and estimated time."""
    known = results.read(given.results)
    wanted = {trial.name for trial in trials}
    seen: set[str] = set()
    for plan in given.plans:
        own = [t for t in PLANS[plan] if t.name in wanted]
        left = [t for t in own if t.name not in known and t.name not in seen]
        print(f"{plan}: {len(own)} trainings; estimate for those left: {sum(t.seconds for t in left):.0f} s")
        for t in own:
            shared = ", see above" if t.name in seen else ""
            print(f"  {t.name:60} {t.seconds:6.0f} s  {results.state(t, given.out, known)}{shared}")
        seen |= {t.name for t in own}


def summarise(given: argparse.Namespace, trials: list[Trial]) -> dict[str, results.Result]:
    """Store the results of trainings that have ended; write the table and, with matplotlib, figures of each plan."""
    known = results.collect(trials, given.out, given.results)
    for plan in given.plans:
        own, folder = PLANS[plan], given.results
        if plan == "replay" and given.epochs is not None:  # do not overwrite those that the README shows
            folder /= f"epochs-{given.epochs}"
        missing = [t.name for t in own if t.name not in known]
        if len(missing) == len(own):  # existing files may be of other epochs
            print(f"\n{plan}: 0 of {len(own)} trainings, nothing written")
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
    """Run the jobs within the time limit; return the names of those that failed, with the reasons."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // given.jobs)))
    with jobs.shared_gpu(given.out, given.mps):
        limit = None if given.limit is None else given.limit - (time.monotonic() - began)
        return jobs.run_jobs(todo, given.jobs, limit).failed


def main() -> int:
    """Train what is left and summarise, or check the stored results."""
    began = time.monotonic()
    given, extra = options()
    trials = selected(given)
    if given.list:
        try:
            show(given, trials)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
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
