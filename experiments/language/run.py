"""PETRA and exact pipelines on a language model of 25M parameters, several trainings at a time on one GPU.

    petra tokenize --train train.txt --test test.txt --vocab-size 8192 --out books-8k
    python experiments/language/run.py lr frontier --data books-8k --jobs 4 --mps
    python experiments/language/run.py long --optimizers muon --lr muon=2e-3 muon:k8=1e-3 --data books-8k
    python experiments/language/run.py --list                  # plans, their trainings and their losses
    python experiments/language/run.py --summarise             # tables and figure of the finished trainings
    python experiments/language/run.py --smoke --jobs 2        # a few of each plan, tiny, on a made text and the CPU

Each training is a `petra train` in its own folder under --out. Arguments after -- go to every training. Trainings that
have finished or diverged are not repeated, and interrupted ones resume from their last checkpoint: repeat the same
command until nothing is left. Results go to --results, one file each, which is all you need to keep. The exit code is 0
if all trainings have ended, 1 if some failed, 2 for bad input and 3 if some are left.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import results
import summary
from cut_tokens import cut_tokens
from made_text import made_text
from plans import LEARNING_RATES, OPTIMIZERS, PLANS, QUESTIONS, Choices, parse_rates
from shared import Job, run_jobs, shared_gpu
from trials import SEQUENCES, Trial

HERE = Path(__file__).parent


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this script, and those that go to every training."""
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", metavar="PLAN", help=f"any of {', '.join(PLANS)} (default: all)")
    parser.add_argument("--data", type=Path, help="folder of `petra tokenize`")
    parser.add_argument("--out", type=Path, default=Path("runs/language"), help="folder of the trainings: %(default)s")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of results, tables and figure")
    parser.add_argument("--jobs", type=int, default=4, help="trainings at a time (default %(default)s)")
    parser.add_argument("--mps", action="store_true", help="share the GPU through CUDA's Multi-Process Service")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop all with a checkpoint after this time")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of trainings, like '*-k8-*'")
    parser.add_argument(
        "--lr",
        nargs="+",
        default=[],
        metavar="SPEC",
        help="other learning rates: OPTIMIZER=LR,… for every k, OPTIMIZER:kK=LR,… for one",
    )
    parser.add_argument(
        "--optimizers",
        nargs="+",
        default=list(OPTIMIZERS),
        choices=tuple(LEARNING_RATES),
        metavar="NAME",
        help="optimizers of lr and frontier; the first is that of parts, model and long (default: adamw muon soap)",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N", help="seeds of every training")
    parser.add_argument("--long-epochs", type=int, default=4, metavar="N", help="epochs of long (default %(default)s)")
    parser.add_argument(
        "--sequences", type=int, default=SEQUENCES, metavar="N", help="sequences per update (default %(default)s)"
    )
    parser.add_argument(
        "--train-tokens", type=int, default=0, metavar="N", help="cut the training split to N tokens (default: all)"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--list", action="store_true", help="only list the trainings and their losses")
    parser.add_argument("--summarise", action="store_true", help="only print tables and draw the figure")
    parser.add_argument("--smoke", action="store_true", help="tiny trainings on a made text, in separate folders")
    given = parser.parse_args(arguments[:split])
    for plan in given.plans:
        if plan not in PLANS:
            parser.error(f"there is no plan {plan!r}: choose from {', '.join(PLANS)}")
    given.plans = given.plans or list(PLANS)
    if given.smoke:
        given.device, given.out = "cpu", given.out.with_name(given.out.name + "_smoke")
        given.results, given.data = given.out / "results", given.out / "tokens"
    elif not (given.list or given.summarise) and (given.data is None or not (given.data / "tokens.json").exists()):
        parser.error(f"--data is {given.data}: give the folder that `petra tokenize --out` has written")
    if given.jobs < 1:
        parser.error(f"--jobs is {given.jobs}: give 1 or more")
    try:
        size = given.sequences, given.train_tokens
        given.choices = Choices(parse_rates(given.lr), given.optimizers, given.seeds, given.long_epochs, *size)
        results.read(given.results)
    except ValueError as error:
        parser.error(str(error))
    if not any(selected(given).values()):
        parser.error(f"no training of {', '.join(given.plans)} is called {' or '.join(given.only)}: see --list")
    return given, arguments[split + 1 :]


def selected(given: argparse.Namespace) -> dict[str, list[Trial]]:
    """Return the selected trainings of each plan; for a smoke, the first and the last of them, tiny."""
    found = {}
    for plan in given.plans:
        trials = [t for t in PLANS[plan](given.choices) if any(fnmatch(t.name, p) for p in given.only)]
        if given.smoke:
            trials = [trial.smoke() for trial in (*trials[:1], *trials[1:][-1:])]
        found[plan] = trials
    return found


def job(trial: Trial, given: argparse.Namespace, extra: list[str]) -> Job:
    """Return the job of a training, which resumes from its checkpoint if there is one."""
    folder = given.out / trial.name
    arguments = trial.arguments()
    if given.device == "cpu" and "--autocast" in arguments:  # few CPUs have fast bf16
        where = arguments.index("--autocast")
        del arguments[where : where + 2]
    command = [sys.executable, "-m", "petra", *arguments, "--data", f"tokens:{given.data}"]
    command += ["--device", given.device, "--out", str(folder), "--resume", "--quiet"]
    return Job(trial.name, [*command, *extra], folder)


def show(given: argparse.Namespace) -> None:
    """Print the trainings of each plan and their losses."""
    known = results.read(given.results)
    for plan, trials in selected(given).items():
        left = sum(trial.name not in known for trial in trials)
        print(f"{plan}: {len(trials)} trainings, {left} left. {QUESTIONS[plan]}")
        for trial in trials:
            print(f"  {trial.name:60} {results.state(trial, given.out, known)}")


def train(given: argparse.Namespace, trials: list[Trial], extra: list[str], began: float) -> dict[str, str]:
    """Run the trainings within the time limit; return the names of those that failed, with the reasons."""
    given.out.mkdir(parents=True, exist_ok=True)
    if given.smoke and not (given.data / "tokens.json").exists():
        text = given.out / "text.txt"
        text.write_text(made_text(7_000))
        command = ["tokenize", "--train", str(text), "--vocab-size", "300", "--out", str(given.data)]
        subprocess.run([sys.executable, "-m", "petra", *command], check=True)
    if given.train_tokens:
        shorter = given.out / f"tokens-{given.train_tokens}"
        if not (shorter / "tokens.json").exists():
            cut_tokens(given.data, shorter, given.train_tokens)
        given.data = shorter
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // given.jobs)))
    with shared_gpu(given.out, given.mps):
        limit = None if given.limit is None else given.limit - (time.monotonic() - began)
        todo = [job(trial, given, extra) for trial in trials]

        def store(_: Job) -> None:  # at once, because the machine may be taken away
            results.collect(trials, given.out, given.results)

        return run_jobs(todo, given.jobs, limit, store).failed


def main() -> int:
    """Train what is left and summarise."""
    began = time.monotonic()
    given, extra = parse()
    if given.list:
        try:
            show(given)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    trials = list({trial.name: trial for own in selected(given).values() for trial in own}.values())
    failed: dict[str, str] = {}
    if not given.summarise:
        results.collect(trials, given.out, given.results)
        known = results.read(given.results)
        failed = train(given, [trial for trial in trials if trial.name not in known], extra, began)
    results.collect(trials, given.out, given.results)
    known = results.read(given.results)
    summary.write(selected(given), known, given.results)
    for name, why in failed.items():
        print(f"FAILED {name}: {why}", file=sys.stderr)
    return 1 if failed else 3 if any(trial.name not in known for trial in trials) else 0


if __name__ == "__main__":
    sys.exit(main())
