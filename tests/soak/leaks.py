"""`python -m soak.leaks` repeats something many times, and measures what stays behind in the process.

Every case is measured 40 times at equal distances. Of every quantity, the slope over the second half counts: the median
of the slopes between all pairs of measurements, which a few outliers do not change. A quantity leaks if this slope,
over the second half, exceeds the quantity's limit.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from itertools import combinations
from pathlib import Path

import torch

SAMPLES = 40


@dataclass(frozen=True)
class Sample:
    """What a process holds."""

    memory: float
    """Resident memory in KiB, after everything that is free was returned to the system."""
    objects: float
    """Blocks of memory that Python has allocated."""
    tensors: float
    """Tensors that are alive."""
    files: float
    """Open file descriptors."""
    threads: float
    """Threads, also those that Python does not know."""
    children: float
    """Child processes, also those that have ended and were not waited for."""

    @classmethod
    def now(cls) -> Sample:
        """Measure this process."""
        gc.collect()
        with suppress(AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)
        status = Path("/proc/self/status").read_text()
        lines = dict(line.split(":", 1) for line in status.splitlines())
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        return cls(
            memory=float(lines["VmRSS"].split()[0]),
            objects=sys.getallocatedblocks(),
            tensors=tensors,
            files=len(os.listdir("/proc/self/fd")),
            threads=int(lines["Threads"]),
            children=len(children_of(os.getpid())),
        )


LIMITS = {"memory": 1024.0, "objects": 400.0, "tensors": 0.5, "files": 0.5, "threads": 0.5, "children": 0.5}
"""The largest growth over the second half that is not a leak."""


@dataclass(frozen=True)
class Growth:
    """The change of one quantity over the second half of the measurements."""

    quantity: str
    first: float
    """The value in the middle of the measurements."""
    last: float
    growth: float
    """The slope, times the length of the second half."""
    limit: float

    @property
    def leaks(self) -> bool:
        """True if it grew too much."""
        return self.growth > self.limit


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Judge measurements at equal distances."""
    half = list(samples)[len(samples) // 2 :]
    found = []
    for quantity in (field.name for field in fields(Sample)):
        values = [float(getattr(sample, quantity)) for sample in half]
        slope = statistics.median((b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(values), 2))
        found.append(Growth(quantity, values[0], values[-1], slope * (len(values) - 1), LIMITS[quantity]))
    return found


def measure(work: Callable[[], object], times: int, samples: int = SAMPLES) -> list[Sample]:
    """Call a function many times and measure at equal distances."""
    gc.collect()
    gc.freeze()  # what is there already need not be visited again and again
    width = len(LIMITS)
    values = array("d", [0.0] * samples * width)  # numbers of Python would count as objects
    for number in range(samples):
        for _ in range(times * number // samples, times * (number + 1) // samples):
            work()
        values[number * width : (number + 1) * width] = array("d", astuple(Sample.now()))
    gc.unfreeze()
    return [Sample(*values[start : start + width]) for start in range(0, len(values), width)]


def children_of(pid: int) -> list[int]:
    """Return the processes whose parent has this number, also those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def report(name: str, times: int, seconds: float, found: Sequence[Growth]) -> str:
    """Return the line of a case in the table."""
    cells = [f"{g.first:.0f} → {g.last:.0f}" + (f" LEAK {g.growth:+.1f}" if g.leaks else "") for g in found]
    return f"| {name} | {times} | {seconds:.0f} | " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print a table, and return 1 if anything leaks."""
    from soak.leak_cases import CASES  # which imports this module

    parser = argparse.ArgumentParser(prog="python -m soak.leaks", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {', '.join(CASES)} (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="repeat each this many times as often (default: 1)")
    options = parser.parse_args(arguments)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"there is no case {', '.join(sorted(unknown))}: give some of {', '.join(CASES)}")
    torch.set_num_threads(1)
    header = ["case", "times", "seconds", *(field.name for field in fields(Sample))]
    print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}", flush=True)
    leaking = []
    for name in options.cases or CASES:
        case = CASES[name]
        times, began = max(SAMPLES, round(case.times * options.scale)), time.monotonic()
        for process, samples in case.run(times).items():
            found = growths(samples)
            label = f"{name} {process}".strip()
            print(report(label, times, time.monotonic() - began, found), flush=True)
            leaking += [f"{label}: {growth.quantity}" for growth in found if growth.leaks]
    print(f"{len(leaking)} leaks" + "".join(f"\n  {leak}" for leak in leaking))
    return 1 if leaking else 0


if __name__ == "__main__":
    sys.exit(main())
