"""Features Replay, DDG and DNI against backprop on CIFAR-10: Table 2 and Figure 3 of the Features Replay paper.

    python experiments/features_replay/run.py --data path/to/cifar10 --device cuda --autocast bf16 --epochs 60 --jobs 4
    python experiments/features_replay/run.py --data … --only resnet164-backprop resnet164-features-replay-2
    python experiments/features_replay/run.py --summarise

Each run is a process and has a folder of its own: one that is done or has diverged is skipped, one that was interrupted
goes on. --jobs of them share the device; after --limit seconds those at work write a checkpoint and stop. --summarise
writes the table of whatever is there into results/ beside this file, which is also done at the end.
"""

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from summary import DIVERGED, Case, summarise

PAPER = ("--batch-size", "128", "--lr", "0.01", "--momentum", "0.9", "--weight-decay", "5e-4", "--drops", "0.5,0.75")
"""Section 5.1: the learning rate drops at 150 and 225 of 300 epochs; of fewer epochs, at the same fractions."""
CASES = {
    case.name: case
    for case in (
        Case("resnet164-basic", "backprop", 1),
        Case("resnet164-basic", "features-replay", 2),
        Case("resnet164-basic", "features-replay", 4, sigma=True),
        Case("resnet164-basic", "ddg", 2),
        Case("resnet164-basic", "ddg", 4),
        Case("resnet164-basic", "dni", 2),
        Case("resnet164-basic", "dni", 4),
        Case("resnet101-cifar", "backprop", 1),
        Case("resnet101-cifar", "features-replay", 2),
        Case("resnet101-cifar", "features-replay", 4, sigma=True),
        Case("resnet101-cifar", "ddg", 2),
        Case("resnet101-cifar", "ddg", 4),
        Case("revnet18", "petra", 4, sigma=True),
        Case("revnet18", "features-replay", 4, sigma=True),
    )
}
SMOKE = ("--depths", "1,1", "--width", "4")


class Runner:
    """Starts runs, and stops them when time is up."""

    def __init__(self, out: Path, given: list[str], every: int, deadline: float) -> None:
        self.out, self.given, self.every, self.deadline = out, given, every, deadline
        self._speaking = threading.Lock()

    def __call__(self, case: Case) -> bool:
        """Whether the run came to an end: it is done, or it has diverged."""
        folder = self.out / case.name
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "summary.json").exists() or (folder / DIVERGED).exists():
            self.say(case, "is done")
            return True
        if time.monotonic() > self.deadline:
            return False
        command = [sys.executable, "-m", "petra", "fidelity" if case.sigma else "train", "--out", str(folder)]
        # A resumed run has its options, but for where it runs.
        command += ["--resume"] if (folder / "checkpoint").exists() else ["--overwrite"]
        command += ["--quiet", "--model", case.model, "--method", case.method, "--stages", str(case.modules)]
        command += ["--warmup-epochs", "0", *PAPER, *self.given]
        if case.sigma:
            command += ["--every", str(self.every)]
        self.say(case, "goes on" if "--resume" in command else "begins")
        with (folder / "run.log").open("a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                code = process.wait(max(1.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # it writes a checkpoint
                code = process.wait()
        said = (folder / "run.log").read_text().strip().splitlines()
        last = said[-1] if said else "no word"
        if code == 1 and "the loss of micro-batch" in last:
            (folder / DIVERGED).write_text(json.dumps({"said": last}) + "\n")
            code = 0
        self.say(case, last if code != 130 else "stopped, and can go on")
        return code == 0

    def say(self, case: Case, text: str) -> None:
        with self._speaking:
            print(f"{case.name}: {text}", flush=True)


def main() -> int:
    """Run what is asked for, and sum up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=CASES, default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--data", metavar="FOLDER", help="CIFAR-10")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--autocast", choices=("bf16",))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each (default %(default)s)")
    parser.add_argument("--every", type=int, default=200, help="updates between two σ (default %(default)s)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which runs stop for now")
    parser.add_argument("--out", type=Path, default=Path("runs/features_replay"), help="default %(default)s")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--summarise", action="store_true", help="train nothing")
    parser.add_argument("--smoke", action="store_true", help="tiny networks on digits, to see that it runs")
    options = parser.parse_args()
    cases = [CASES[name] for name in options.only]
    if options.smoke:
        options.results, options.every = options.out / "results", 5
        options.data, options.epochs, options.device, options.threads = options.data or "digits", 2, "cpu", 1
    ended = [True]
    if not options.summarise:
        if options.data is None:
            parser.error("--data is missing: give the folder of CIFAR-10")
        given = ["--data", str(options.data), "--epochs", str(options.epochs), "--device", options.device]
        given += ["--threads", str(options.threads), "--seed", str(options.seed)]
        given += ["--autocast", options.autocast] if options.autocast else []
        given += SMOKE if options.smoke else ()
        runner = Runner(options.out, given, options.every, time.monotonic() + options.limit)
        with ThreadPoolExecutor(options.jobs) as pool:
            ended = list(pool.map(runner, cases))
    summarise(list(CASES.values()), options.out, options.results)
    return 0 if all(ended) else 1


if __name__ == "__main__":
    sys.exit(main())
