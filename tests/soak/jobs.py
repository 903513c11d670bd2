"""Jobs of the soak: what is trained, and one attempt at it with all its processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "PETRA_SOAK_ATTEMPT"
"""An environment variable of all processes of an attempt."""
FAULT_LIMIT = 240.0
"""Seconds that a job has until the moment of its fault, if the machine is not busy."""
COPY_LIMIT = 10.0
"""Seconds to copy what was printed, after the last process has ended."""


@dataclass(frozen=True)
class Job:
    """A training, and the processes that share it."""

    name: str
    options: tuple[str, ...] = ()
    processes: int = 1
    replicas: int = 1
    workers: bool = False
    """True if processes decode data for it."""
    program: tuple[str, ...] = ("-m", "soak.faulty_petra")
    """What Python runs."""

    @property
    def targets(self) -> list[str]:
        """The processes to which something can happen."""
        ranks = [f"process {number}" for number in range(self.processes)]
        return [*ranks, *(["launcher"] if self.processes > 1 else []), *(["worker"] if self.workers else [])]

    def arguments(self, folder: Path, timeout: float) -> list[str]:
        """The arguments of the command line that start it, or continue it."""
        common = ["train", "--model", "revnet18", "--width", "4", "--depths", "1,1", "--stages", "4"]
        common += ["--batch-size", "32", "--epochs", "2", "--lr", "0.05", "--warmup-epochs", "1", "--ema", "0.9"]
        common += ["--data", "synthetic:3x8x8:10:640", "--checkpoint-every", "3", "--threads", "1", "--quiet"]
        place = ["--device", "cpu", "--timeout", str(timeout), "--out", str(folder), "--resume"]
        return [*common, *self.options, *place]


JOBS = {
    job.name: job
    for job in (
        Job("one"),
        Job("workers", ("--augment", "randaugment", "--workers", "1"), workers=True),
        Job("two", ("--ranks", "2"), 2),
        Job("four", ("--ranks", "4"), 4),
        Job("replicas", ("--ranks", "2", "--replicas", "2", "--accumulate", "2"), 4, replicas=2),
    )
}


class Attempt:
    """A job that runs, from its start to its end.

    Args:
        job: The job.
        place: A folder for this attempt: `run` in it is the folder of the training.
        name: Names the attempt among all that run on this machine.
        timeout: The job's `--timeout`.
        environment: More environment variables.
        extra: More arguments.
    """

    def __init__(
        self,
        job: Job,
        place: Path,
        name: str,
        timeout: float,
        environment: Mapping[str, str] | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        self.job, self.folder, self.name = job, place / "run", name
        self.temporary = place / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self._log = place / f"{name}.log"
        paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        variables = {
            **os.environ,
            **(environment or {}),
            MARK: name,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TMPDIR": str(self.temporary),
        }
        command = [sys.executable, *job.program, *job.arguments(self.folder, timeout), *extra]
        # Through a pipe: a limit of the size of files must not keep a process from saying why it ends.
        output, printed = os.pipe()
        self._copying = threading.Thread(target=self._copy, args=(output,), daemon=True)
        self._copying.start()
        try:
            self.process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, start_new_session=True
            )
        finally:
            os.close(printed)
        self.began = time.monotonic()
        self.fault_limit = FAULT_LIMIT
        """Seconds that it has until the moment of its fault."""
        self.seen: set[int] = set()
        """The numbers of all processes of the attempt that were seen."""

    def pid(self, target: str) -> int | None:
        """Return the number of a process; None if it is not there."""
        found = self.processes()
        if target == "launcher" or (self.job.processes == 1 and target == "process 0"):
            return self.process.pid if self.process.pid in found else None
        children = {pid: rank for pid, (parent, rank) in found.items() if parent == self.process.pid}
        parents = {self.process.pid, *(pid for pid, rank in children.items() if not rank)}  # also the fork server
        for pid, (parent, rank) in found.items():
            if target == "worker" and pid in children:
                return pid
            if target == f"process {rank}" and parent in parents:
                return pid
        return None

    def processes(self) -> dict[int, tuple[int, str]]:
        """Return the processes that are alive: their number, parent and rank."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                variables = dict(
                    line.split(b"=", 1) for line in (path / "environ").read_bytes().split(b"\0") if b"=" in line
                )
                if variables.get(MARK.encode(), b"").decode() != self.name:
                    continue
                state, parent = (path / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                forked = re.fullmatch(r"petra-(\d+)", (path / "comm").read_text().strip())
                rank = forked[1] if forked else variables.get(b"RANK", b"").decode()
                if state != "Z":
                    found[int(path.name)] = int(parent), rank
        self.seen |= found.keys()
        return found

    @property
    def running(self) -> bool:
        """True until the command has ended."""
        return self.process.poll() is None

    @property
    def checkpoints(self) -> int:
        """The number of the last checkpoint; 0 if there is none."""
        try:
            return int(json.loads((self.folder / "checkpoint" / "latest.json").read_text())["name"])
        except (OSError, ValueError, KeyError):
            return 0

    @property
    def said(self) -> str:
        """The output of the processes; complete if they have ended."""
        if not self.running and not self.processes():
            self._copying.join(COPY_LIMIT)
        return self._log.read_text(errors="replace")

    def _copy(self, output: int) -> None:
        with os.fdopen(output, "rb", buffering=0) as source, self._log.open("wb", buffering=0) as log:
            while data := source.read(65536):
                log.write(data)

    def wait_until(self, condition: Callable[[], bool], limit: float, interval: float = 0.02) -> bool:
        """Wait while the job runs, until a condition holds; return whether it did."""
        deadline = time.monotonic() + limit
        while self.running and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(interval)
        return False

    def end(self, limit: float) -> int | None:
        """Wait for the end of all processes; return the exit code, or None if one had to be killed."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if not self.running and not self.processes():
                return self.process.returncode
            time.sleep(0.1)
        self.kill()
        return None

    def kill(self) -> None:
        """Kill all processes of the attempt."""
        while self.running or self.processes():
            for pid in self.processes():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
