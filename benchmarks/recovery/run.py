"""How long a job of `petra train --ranks` takes to recover from a lost process, and what snapshots cost.

    python benchmarks/recovery/run.py
    python benchmarks/recovery/run.py --smoke

Kills (SIGKILL) or stops (SIGSTOP) random ranks at random moments, measures the time until the next completed tick of
all ranks, and compares the final weights with those of a run without faults. Then it trains with and without snapshots
in turns and compares the speed. Prints tables and writes result.json, or where --out says.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from petra.formatting import render
from petra.measure import environment

HERE = Path(__file__).parent
NETWORK = ("--model", "revnet18", "--depths", "1,1", "--stages", "4", "--lr", "0.05", "--warmup-epochs", "0.1")
LIMIT = 120.0


@dataclass
class Case:
    """A job whose processes are lost."""

    ranks: int
    signal: int
    faults: int
    spares: int = 0

    @property
    def name(self) -> str:
        kind = "killed" if self.signal == signal.SIGKILL else "stopped"
        return f"{self.ranks} ranks, {kind}" + (f", {self.spares} spare" if self.spares else "")


@dataclass
class Fault:
    """A fault and what followed."""

    rank: int
    seconds: float
    repeated: int


def command(out: Path, options: argparse.Namespace, *more: object) -> list[str]:
    data = f"synthetic:1x8x8:10:{options.samples}"
    run = ("--data", data, "--batch-size", options.batch_size, "--width", options.width, "--epochs", options.epochs)
    where = ("--device", "cpu", "--threads", 1, "--quiet", "--checkpoint-epochs", 1000, "--overwrite", "--out", out)
    return [sys.executable, "-m", "worker", "train", *map(str, (*NETWORK, *run, *where, *more))]


def variables(ticks: Path) -> dict[str, str]:
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PETRA_TICKS": str(ticks), "OMP_NUM_THREADS": "1"}


def weights(out: Path) -> str:
    return str(json.loads((out / "summary.json").read_text())["weights_sha256"])


def notes(ticks: Path, rank: int) -> list[tuple[str, int, float, int]]:
    """Return the complete lines of a rank: kind, process, time, and micro-batch or tick."""
    file = ticks / f"{rank}.txt"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [(kind, int(pid), float(at), int(n)) for kind, pid, at, n in (line.split() for line in lines)]


def recovered(ticks: Path, ranks: int, since: float) -> tuple[float, int] | None:
    """Return when all ranks have completed a tick after they started again, and the tick they started from."""
    moments, first = [], 0
    for rank in range(ranks):
        found = notes(ticks, rank)
        starts = [index for index, (kind, _, at, _) in enumerate(found) if kind == "start" and at > since]
        after = [at for kind, _, at, _ in found[starts[-1] :] if kind == "tick"] if starts else []
        if not after:
            return None
        moments.append(after[0])
        first = found[starts[-1]][3]
    return max(moments), first


def faults(case: Case, options: argparse.Namespace, folder: Path, chance: random.Random) -> tuple[list[Fault], str]:
    """Run one job with faults, and return them and the hash of its weights."""
    ticks = folder / f"ticks-{case.ranks}-{case.signal}-{case.spares}"
    ticks.mkdir()
    out = folder / ticks.name.replace("ticks", "run")
    found: list[Fault] = []
    recovery = ("--snapshot-every", options.every, "--replacements", 1000, "--timeout", options.timeout)
    job = command(out, options, "--ranks", case.ranks, "--spares", case.spares, *recovery)
    process = subprocess.Popen(job, env=variables(ticks), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: all(notes(ticks, rank)[20:] for rank in range(case.ranks)), process)
        for _ in range(case.faults):
            time.sleep(chance.uniform(0.2, 1.5) + (3 if case.spares else 0))  # a new spare one has to start
            rank = chance.randrange(case.ranks)
            before = notes(ticks, rank)
            if process.poll() is not None:
                raise SystemExit(f"{case.name}: the job ended after {len(found)} faults: give more --epochs")
            at = time.monotonic()
            os.kill(before[-1][1], case.signal)
            after = wait_until(lambda at=at: recovered(ticks, case.ranks, at), process)
            found.append(Fault(rank, after[0] - at, before[-1][3] - after[1]))
        process.wait(10 * LIMIT)
    finally:
        process.kill()
    return found, weights(out)


def wait_until(condition, process):
    deadline = time.monotonic() + LIMIT
    while not (result := condition()):
        if time.monotonic() > deadline or process.poll() is not None:
            raise SystemExit(f"the job has not recovered within {LIMIT:.0f} s, or has ended")
        time.sleep(0.02)
    return result


def overhead(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Return the samples per second of jobs without snapshots and with them, in turns."""
    speeds: dict[str, list[float]] = {"no snapshots": [], f"every {options.every} ticks": []}
    for repeat in range(options.repeats):
        for every, name in zip((0, options.every), speeds, strict=True):
            ticks = folder / f"speed-{repeat}-{every}"
            ticks.mkdir()
            job = command(ticks / "run", options, "--ranks", 2, "--snapshot-every", every)
            subprocess.run(job, env=variables(ticks), check=True, capture_output=True, timeout=10 * LIMIT)
            summary = json.loads((ticks / "run" / "summary.json").read_text())
            speeds[name].append(summary["samples_per_second"])
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=15, help="kills in each job")
    parser.add_argument("--hangs", type=int, default=5, help="stopped ranks in each job")
    parser.add_argument("--every", type=int, default=50, help="ticks between snapshots")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds after which a rank counts as stuck")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5, help="jobs for the cost of snapshots, of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few seconds; writes nothing")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    options = parser.parse_args()
    cases = [Case(ranks, signal.SIGKILL, options.kills) for ranks in (2, 4)]
    cases += [Case(ranks, signal.SIGSTOP, options.hangs) for ranks in (2, 4)]
    cases += [Case(2, signal.SIGKILL, options.hangs, spares=1)]
    if options.smoke:
        options.epochs, options.samples, options.repeats = 6, 2048, 1
        cases = [Case(2, signal.SIGKILL, 1)]
    chance, results = random.Random(options.seed), []  # noqa: S311 - faults, not secrets
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "alone").mkdir()
        alone = command(folder / "alone" / "run", options)
        subprocess.run(alone, env=variables(folder / "alone"), check=True, capture_output=True, timeout=10 * LIMIT)
        expected = weights(folder / "alone" / "run")
        for case in cases:
            found, got = faults(case, options, folder, chance)
            results.append({**asdict(case), "same_weights": got == expected, "found": [asdict(f) for f in found]})
            print(f"{case.name}: {statistics.median(f.seconds for f in found):.2f} s", flush=True)
        speeds = overhead(options, folder)
    rows: list[tuple[str, ...]] = [("", "faults", "median s", "longest s", "ticks repeated", "same weights")]
    for case, result in zip(cases, results, strict=True):
        seconds, repeated = [[f[key] for f in result["found"]] for key in ("seconds", "repeated")]
        times = f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"
        rows.append((case.name, str(len(seconds)), *times, f"at most {max(repeated)}", str(result["same_weights"])))
    print(render(rows[0], rows[1:]))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    without, with_ = medians.values()
    for name, value in medians.items():
        print(f"{name}: {value:.0f} samples/s")
    print(f"with snapshots: {with_ / without:.3f} times the speed")
    if not options.smoke:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        record = {"settings": settings, "cases": results, "speeds": speeds, "environment": environment()}
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
