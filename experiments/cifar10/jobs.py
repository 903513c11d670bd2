"""Runs trainings, several at a time on one device, until they are done or the time limit is reached."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

GRACE = 90.0
"""Seconds that a training has to write its checkpoint after it was asked to stop."""
LEAST = 20.0
"""Seconds that must be left for a training to be started."""
LOG = "log.txt"
DIVERGENCE = re.compile(r"the loss of micro-batch \d+ on stage \d+ is |is not finite after micro-batch \d+")
"""Petra's messages about divergence; its exit code is the same as for other failures."""


@dataclass(frozen=True)
class Job:
    """A command with its own folder, in which its output goes to a log."""

    name: str
    command: list[str]
    folder: Path
    enough: Callable[[Path], bool] | None = None
    """Returns whether the folder holds everything needed; then the job is ended and its checkpoint removed."""


@dataclass
class Outcome:
    """Names of the jobs that finished, that stopped on request, that diverged and that failed, with the messages."""

    done: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    diverged: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    has_enough: bool = False


def run_jobs(
    jobs: Sequence[Job], at_once: int, limit: float | None = None, on_end: Callable[[Job], None] | None = None
) -> Outcome:
    """Run the jobs in order; after `limit` seconds, or on a signal, start no more and end those that are running.

    They are ended with SIGTERM, on which Petra writes a checkpoint. `on_end` is called with each job that has ended.
    """
    waiting, running, outcome = list(jobs), list[_Running](), Outcome()
    end = None if limit is None else time.monotonic() + limit
    asked = False
    with _stop_requests() as requests:
        while running or (waiting and not asked):
            left = float("inf") if end is None else end - time.monotonic()
            if not asked and (requests or left <= 0):
                asked = True
                print(f"stopping {len(running)} trainings; they are writing checkpoints", flush=True)
                for one in running:
                    one.process.terminate()
                deadline = time.monotonic() + GRACE
            if asked and time.monotonic() > deadline:
                for one in running:
                    one.process.kill()
            while waiting and len(running) < at_once and not asked and left > LEAST:
                running.append(_begin(waiting.pop(0)))
            if waiting and not running and not asked:
                print(f"less than {LEAST:.0f} s are left: {len(waiting)} trainings are not started", flush=True)
                break
            time.sleep(0.1)
            for one in running:
                if one.job.enough is not None and not one.has_enough and one.job.enough(one.job.folder):
                    one.has_enough = True
                    one.process.terminate()  # killing it could harm others that share the GPU with it
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                _end(one, outcome, asked)
                if on_end is not None:
                    on_end(one.job)
    return outcome


def _begin(job: Job) -> _Running:
    job.folder.mkdir(parents=True, exist_ok=True)
    log = (job.folder / LOG).open("ab")
    print(f"start {job.name}", flush=True)
    # In its own process group, so that Ctrl-C reaches it once: from here.
    process = subprocess.Popen(job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
    return _Running(job, process, log)


def _end(one: _Running, outcome: Outcome, asked: bool) -> None:
    one.log.close()
    if one.has_enough:  # checkpoints can be gigabytes, and nobody resumes this training
        shutil.rmtree(one.job.folder / "checkpoint", ignore_errors=True)
    code, name = one.process.returncode, one.job.name
    if code == 0 or one.has_enough:
        outcome.done.append(name)
        said = "done"
    elif code == 130 or (asked and code in (-signal.SIGTERM, -signal.SIGKILL)):
        outcome.stopped.append(name)
        said = "stopped"
    elif code < 0:  # it left no message: the log ends with earlier ones
        outcome.failed[name] = f"ended by {signal.Signals(-code).name}"
        said = f"FAILED: {outcome.failed[name]}"
    elif found := divergence(one.job.folder):
        outcome.diverged[name] = found
        said = f"diverged: {found}"
    else:
        outcome.failed[name] = next(reversed(_last_lines(one.job.folder)), f"exit code {code}")
        said = f"FAILED: {outcome.failed[name]}"
    print(f"{name}: {said}", flush=True)


def divergence(folder: Path) -> str | None:
    """Return the message of a training that ended because it diverged, None for others."""
    found = [line for line in _last_lines(folder) if DIVERGENCE.search(line)]
    return found[-1].removeprefix("petra: error: ") if found else None


def _last_lines(folder: Path) -> list[str]:
    """The last few lines, because libraries may print something after Petra's message."""
    log = folder / LOG
    return log.read_text(errors="replace").strip().splitlines()[-4:] if log.exists() else []


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of ending the process."""
    received: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    usual = {n: signal.signal(n, lambda number, frame: received.append(number)) for n in signals}
    try:
        yield received
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


@contextmanager
def shared_gpu(folder: Path, wanted: bool) -> Iterator[None]:
    """Start CUDA's Multi-Process Service, with which kernels of several processes run concurrently."""
    program = shutil.which("nvidia-cuda-mps-control") if wanted else None
    if program is None:
        if wanted:
            print("nvidia-cuda-mps-control was not found: trainings take turns on the GPU", file=sys.stderr)
        yield
        return
    pipes = folder.resolve() / "mps"
    pipes.mkdir(parents=True, exist_ok=True)
    os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(pipes)}
    started = subprocess.run([program, "-d"], check=False).returncode == 0
    if not started:  # another runner, perhaps one that was killed, has started it already
        print(f"MPS was not started: trainings use the service in {pipes}, or take turns on the GPU", file=sys.stderr)
    try:
        yield
    finally:
        if started:
            subprocess.run([program], input=b"quit\n", check=False)
