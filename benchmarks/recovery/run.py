"""How long a job of `petra train --ranks` takes to recover from a lost process, and what snapshots cost.

    python benchmarks/recovery/run.py
    python benchmarks/recovery/run.py --smoke

Kills (SIGKILL) or stops (SIGSTOP) random ranks at random moments, measures the time until the next completed tick of
all ranks, and compares the final weights with those of a run without faults. Then it trains with and without snapshots
in turns and compares the speed, and the processor time of the ranks, which other programs disturb less. Prints tables
and writes result.json, or where --out says, after every part.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from petra.formatting import render
from petra.measure import environment

HERE = Path(__file__).parent
NETWORK = ("--model", "revnet18", "--depths", "1,1", "--stages", "4", "--lr", "0.05", "--warmup-epochs", "0.1")
LIMIT = 120.0


@dataclass(frozen=True)
class Size:
    """The size of a training."""

    width: int
    batch_size: int
    samples: int
    epochs: int


SMALL, MEDIUM = Size(8, 32, 4096, 10), Size(32, 128, 8192, 6)


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


def command(out: Path, size: Size, *more: object) -> list[str]:
    data = f"synthetic:1x8x8:10:{size.samples}"
    run = ("--data", data, "--batch-size", size.batch_size, "--width", size.width, "--epochs", size.epochs)
    where = ("--device", "cpu", "--threads", 1, "--quiet", "--checkpoint-epochs", 1000, "--overwrite", "--out", out)
    return [sys.executable, "-m", "worker", "train", *map(str, (*NETWORK, *run, *where, *more))]


def variables(ticks: Path) -> dict[str, str]:
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PETRA_TICKS": str(ticks), "OMP_NUM_THREADS": "1"}


def weights(out: Path) -> str:
    return str(json.loads((out / "summary.json").read_text())["weights_sha256"])


Note = tuple[str, int, float, int, float]
"""A line of a rank: kind, process, time, micro-batch or tick, and processor time."""


def notes(ticks: Path, rank: int) -> list[Note]:
    """Return the complete lines of a rank."""
    file = ticks / f"{rank}.txt"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    fields = (line.split() for line in lines)
    return [(kind, int(pid), float(at), int(n), float(cpu)) for kind, pid, at, n, cpu in fields]


def recovered(ticks: Path, ranks: int, since: float) -> tuple[float, int] | None:
    """Return when all ranks have completed a tick after they started again, and the tick they started from."""
    moments, first = [], 0
    for rank in range(ranks):
        found = notes(ticks, rank)
        starts = [index for index, (kind, _, at, *_) in enumerate(found) if kind == "start" and at > since]
        after = [at for kind, _, at, *_ in found[starts[-1] :] if kind == "tick"] if starts else []
        if not after:
            return None
        moments.append(after[0])
        first = found[starts[-1]][3]
    return max(moments), first


def faults(
    case: Case, options: argparse.Namespace, size: Size, folder: Path, chance: random.Random
) -> tuple[list[Fault], str]:
    """Run one job with faults, and return them and the hash of its weights."""
    ticks = folder / f"ticks-{case.ranks}-{case.signal}-{case.spares}"
    ticks.mkdir()
    out = folder / ticks.name.replace("ticks", "run")
    found: list[Fault] = []
    recovery = ("--snapshot-every", options.every, "--replacements", 1000, "--timeout", options.timeout)
    job = command(out, size, "--ranks", case.ranks, "--spares", case.spares, *recovery)
    log = folder / f"{ticks.name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(job, env=variables(ticks), stderr=file, stdout=subprocess.DEVNULL)
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
        if process.wait(10 * LIMIT) != 0:
            raise SystemExit("the job failed")
    except SystemExit as error:
        raise SystemExit(f"{case.name}: {error}\n{log.read_text()}") from None
    finally:
        process.terminate()  # it ends its processes
        process.wait()
    return found, weights(out)


def wait_until(condition, process):
    deadline = time.monotonic() + LIMIT
    while not (result := condition()):
        if time.monotonic() > deadline or process.poll() is not None:
            raise SystemExit(f"the job has not recovered within {LIMIT:.0f} s, or has ended")
        time.sleep(0.02)
    return result


def train(size: Size, folder: Path, *more: object) -> dict[str, Any]:
    """Train without faults and return the summary."""
    folder.mkdir()
    job = command(folder / "run", size, *more)
    subprocess.run(job, env=variables(folder), check=True, capture_output=True, timeout=10 * LIMIT)
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return summary


def processor_time(ticks: Path) -> float:
    """Return the processor time of all ranks per tick, in milliseconds; the first ticks do not count."""
    total = 0.0
    for rank in range(2):
        found = [note for note in notes(ticks, rank) if note[0] == "tick"][20:]
        total += 1e3 * (found[-1][-1] - found[0][-1]) / (len(found) - 1)
    return total


def overhead(size: Size, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return samples per second and processor time of pairs of jobs, without snapshots and with them."""
    jobs = []
    for repeat in range(options.repeats):
        for every in (0, options.every) if repeat % 2 == 0 else (options.every, 0):
            ticks = folder / f"{size.width}-{repeat}-{every}"
            speed = train(size, ticks, "--ranks", 2, "--snapshot-every", every)["samples_per_second"]
            jobs.append({"repeat": repeat, "every": every, "speed": speed, "processor_ms": processor_time(ticks)})
    medians = {
        f"{name}_{key}": statistics.median(job[key] for job in jobs if job["every"] == every)
        for name, every in (("without", 0), ("with", options.every))
        for key in ("speed", "processor_ms")
    }
    return {**asdict(size), "tick_ms": 1e3 * size.batch_size / medians["without_speed"], **medians, "jobs": jobs}


def show(record: dict[str, Any]) -> None:
    """Print the tables."""
    rows = []
    for case in record["cases"]:
        seconds, repeated = [[fault[key] for fault in case["found"]] for key in ("seconds", "repeated")]
        times = f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"
        rows.append((case["name"], str(len(seconds)), *times, str(max(repeated)), str(case["same_weights"])))
    print(render(("", "faults", "median s", "longest s", "most ticks repeated", "same weights"), rows), flush=True)
    rows = []
    for one in record["speeds"]:
        more = one["with_processor_ms"] / one["without_processor_ms"] - 1
        columns = [f"{one[f'{name}_{key}']:.1f}" for key in ("speed", "processor_ms") for name in ("without", "with")]
        rows.append((f"{one['tick_ms']:.0f} ms", *columns, f"{100 * more:.1f} %"))
    if rows:
        print(render(("tick", "samples/s", "with", "processor ms a tick", "with", "more"), rows), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="kills in each job")
    parser.add_argument("--hangs", type=int, default=10, help="stopped ranks in each job, and kills with a spare")
    parser.add_argument("--every", type=int, default=50, help="ticks between snapshots")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds after which a rank counts as stuck")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of the jobs with faults")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of jobs for the cost of snapshots")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="one kill; writes nothing")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    options = parser.parse_args(arguments)
    cases = [Case(ranks, signal.SIGKILL, options.kills) for ranks in (2, 4)]
    cases += [Case(ranks, signal.SIGSTOP, options.hangs) for ranks in (2, 4)]
    cases += [Case(2, signal.SIGKILL, options.hangs, spares=1)]
    size, speeds = replace(SMALL, epochs=options.epochs), [SMALL, MEDIUM]
    if options.smoke:
        size, speeds, options.repeats = replace(SMALL, samples=2048, epochs=4), [replace(SMALL, epochs=1)], 1
        cases = [Case(2, signal.SIGKILL, 1)]
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    record: dict[str, Any] = {"settings": settings, "environment": environment(), "cases": [], "speeds": []}

    def done(part: str, result: dict[str, Any]) -> None:
        record[part].append(result)
        if not options.smoke:
            options.out.write_text(json.dumps(record, indent=2) + "\n")
        show(record)

    chance = random.Random(options.seed)  # noqa: S311 - faults, not secrets
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = train(size, folder / "alone")["weights_sha256"]
        for case in cases:
            found, got = faults(case, options, size, folder, chance)
            result = {"same_weights": got == expected, "found": [asdict(fault) for fault in found]}
            done("cases", {"name": case.name, **asdict(case), **result})
        for one in speeds:
            done("speeds", overhead(one, options, folder))


if __name__ == "__main__":
    main()
