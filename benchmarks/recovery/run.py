"""How long a job of `petra train --ranks` takes to recover from a lost process, and what snapshots cost.

    python benchmarks/recovery/run.py
    python benchmarks/recovery/run.py --smoke

Kills (SIGKILL) or stops (SIGSTOP) random ranks at random moments, measures the time until the next completed tick of
all ranks, and compares the final weights with those of a run without faults. Then it compares the time and the
processor time of ticks in blocks of one job, with and without snapshots in turns. Prints tables and writes result.json,
or where --out says, after every part.
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
SNAPSHOTS = 5
"""The snapshots in a block of ticks."""


@dataclass(frozen=True)
class Size:
    """The size of a training."""

    width: int
    batch_size: int
    samples: int
    epochs: int


SMALL, MEDIUM = Size(8, 32, 4096, 10), Size(32, 96, 8192, 6)


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


def train(size: Size, folder: Path, *more: object, **environ: str) -> dict[str, Any]:
    """Train without faults and return the summary."""
    folder.mkdir()
    job = command(folder / "run", size, *more)
    subprocess.run(job, env=variables(folder) | environ, check=True, capture_output=True, timeout=10 * LIMIT)
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return summary


def overhead(size: Size, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the time and the processor time of a tick, without snapshots and with them, in blocks of one job."""
    block, ticks = SNAPSHOTS * options.every, folder / f"speed-{size.width}"
    count = 2 * (options.blocks + 1)  # the first two do not count
    one_epoch = replace(size, samples=block * count * size.batch_size, epochs=1)
    train(one_epoch, ticks, "--ranks", 2, "--snapshot-every", options.every, PETRA_BLOCK=str(block))
    ranks = [{note[3]: note for note in notes(ticks, rank) if note[0] == "tick"} for rank in range(2)]
    blocks = []
    for number in range(2, count):
        ends = [(rank[block * number - 1], rank[block * (number + 1) - 1]) for rank in ranks]
        seconds = ends[-1][1][2] - ends[-1][0][2]
        processor = sum(after[4] - before[4] for before, after in ends)
        taken = number % 2 == 1
        blocks.append({"snapshots": taken, "ms": 1e3 * seconds / block, "processor_ms": 1e3 * processor / block})
    pairs = list(zip(blocks[::2], blocks[1::2], strict=True))
    more = {key: statistics.median(b[key] / a[key] for a, b in pairs) - 1 for key in ("ms", "processor_ms")}
    return {**asdict(one_epoch), "more": more, "blocks": blocks}


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
        medians = {
            (key, taken): statistics.median(block[key] for block in one["blocks"] if block["snapshots"] == taken)
            for key in ("ms", "processor_ms")
            for taken in (False, True)
        }
        rows.append(tuple(f"{medians[key, taken]:.2f}" for key in ("ms", "processor_ms") for taken in (False, True)))
        rows[-1] += tuple(f"{100 * one['more'][key]:.1f} %" for key in ("ms", "processor_ms"))
    if rows:
        columns = ("ms a tick", "with", "processor ms", "with", "more time", "more processor time")
        print(render(columns, rows), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="kills in each job")
    parser.add_argument("--hangs", type=int, default=10, help="stopped ranks in each job, and kills with a spare")
    parser.add_argument("--every", type=int, default=50, help="ticks between snapshots")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds after which a rank counts as stuck")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of the jobs with faults")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of ticks with snapshots, and as many without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="one kill; writes nothing")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    options = parser.parse_args(arguments)
    cases = [Case(ranks, signal.SIGKILL, options.kills) for ranks in (2, 4)]
    cases += [Case(ranks, signal.SIGSTOP, options.hangs) for ranks in (2, 4)]
    cases += [Case(2, signal.SIGKILL, options.hangs, spares=1)]
    size, speeds = replace(SMALL, epochs=options.epochs), [SMALL, MEDIUM]
    if options.smoke:
        size, speeds, options.blocks = replace(SMALL, samples=2048, epochs=4), [SMALL], 1
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
