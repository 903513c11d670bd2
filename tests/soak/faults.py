"""The faults: how each is drawn, and how it is done to a running job."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from soak.hooks import VARIABLE
from soak.jobs import Attempt, Job

CHECKPOINTS = 14
"""About as many as a job writes."""


@dataclass(frozen=True)
class Fault(ABC):
    """Something that happens to one process of a job."""

    kind: str
    target: str
    """`process 2`, counted over all ranks and replicas, `launcher` or `worker`."""
    fatal: bool
    """False if the job has to go on as if nothing had happened."""

    @abstractmethod
    def happen(self, attempt: Attempt) -> bool:
        """Wait for the moment and do it; return False if the job ended before."""

    def environment(self, place: Path) -> dict[str, str]:
        """Return what the processes of the job need to know."""
        return {}

    def __str__(self) -> str:
        return f"{self.kind}, {self.target}"


@dataclass(frozen=True)
class Moment:
    """A time within a job: some seconds after a checkpoint, or after the start."""

    checkpoint: int
    """The number of checkpoints that this attempt has written before; 0 is the start."""
    seconds: float

    @classmethod
    def draw(cls, chance: random.Random) -> Moment:
        """One in five is during the start."""
        if chance.random() < 0.2:
            return cls(0, chance.uniform(0.0, 8.0))
        return cls(chance.randrange(1, CHECKPOINTS), chance.uniform(0.0, 0.5))

    def wait(self, attempt: Attempt) -> bool:
        """Wait for it; return False if the job ended before."""
        first = attempt.checkpoints
        if not attempt.wait_until(lambda: attempt.checkpoints >= first + self.checkpoint, attempt.fault_limit):
            return False
        end = time.monotonic() + self.seconds
        return not attempt.wait_until(lambda: time.monotonic() >= end, attempt.fault_limit) or attempt.running

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s after " + (f"checkpoint +{self.checkpoint}" if self.checkpoint else "the start")


@dataclass(frozen=True)
class Signals(Fault):
    """A process gets signals from outside."""

    moment: Moment
    numbers: tuple[int, ...]
    pause: float = 0.0
    """Seconds between two signals."""

    def happen(self, attempt: Attempt) -> bool:
        if not self.moment.wait(attempt) or (pid := _wait_for_target(attempt, self.target)) is None:
            return False
        for i, number in enumerate(self.numbers):
            if i > 0:
                attempt.wait_until(lambda: False, self.pause)
            if i > 0 and pid not in attempt.processes():
                break  # its number may belong to another process now
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return True

    def __str__(self) -> str:
        pause = f" for {self.pause:.1f} s" if self.pause else ""
        return f"{super().__str__()}{pause}, {self.moment}"


@dataclass(frozen=True)
class FileLimit(Fault):
    """From a moment on, files of a process cannot become larger: as a full disk, with another error number."""

    moment: Moment
    bytes: int

    def happen(self, attempt: Attempt) -> bool:
        if not self.moment.wait(attempt) or (pid := _wait_for_target(attempt, self.target)) is None:
            return False
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (self.bytes, self.bytes))
        return True

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.bytes} bytes, {self.moment}"


@dataclass(frozen=True)
class Hook(Fault):
    """A process does something wrong itself."""

    tick: int
    seconds: float
    _file: list[Path] = field(default_factory=list, compare=False, repr=False)

    def environment(self, place: Path) -> dict[str, str]:
        file = place / "has-happened"
        file.unlink(missing_ok=True)
        self._file[:] = [file]
        return {VARIABLE: f"{self.kind}:{self.target.split()[-1]}:{self.tick}:{self.seconds}:{file}"}

    def happen(self, attempt: Attempt) -> bool:
        attempt.wait_until(self._file[0].exists, attempt.fault_limit)
        return self._file[0].exists()

    def __str__(self) -> str:
        seconds = f" {self.seconds:.1f} s" if self.seconds else ""
        return f"{super().__str__()}{seconds}, tick {self.tick}"


def _wait_for_target(attempt: Attempt, target: str) -> int | None:
    """Return the number of the process; it may not have been started yet."""
    attempt.wait_until(lambda: attempt.pid(target) is not None, attempt.fault_limit)
    return attempt.pid(target)


Draw = Callable[[random.Random, Job, float], Fault | None]


def _signals(kind: str, *numbers: int, pauses: Callable[[float], tuple[float, float]] | None = None) -> Draw:
    fatal = pauses is None or pauses(1000.0)[1] > 1000.0

    def draw(chance: random.Random, job: Job, timeout: float) -> Fault:
        target, moment = chance.choice(job.targets), Moment.draw(chance)
        pause = 0.0 if pauses is None else chance.uniform(*pauses(timeout))
        return Signals(kind, target, fatal, moment, numbers, pause)

    return draw


def _file_limit(chance: random.Random, job: Job, timeout: float) -> Fault:
    target = f"process {chance.randrange(job.processes)}"
    return FileLimit("full disk", target, True, Moment.draw(chance), chance.choice([0, 300, 5000, 20_000]))


def _hook(kind: str, fatal: bool, seconds: tuple[float, float] = (0.0, 0.0), alone: bool = False) -> Draw:
    def draw(chance: random.Random, job: Job, timeout: float) -> Fault | None:
        if job.processes == 1 and not alone:
            return None
        target = f"process {chance.randrange(job.processes)}"
        return Hook(kind, target, fatal, chance.randrange(2, 36), chance.uniform(*seconds))

    return draw


FAULTS: dict[str, Draw] = {
    "kill": _signals("kill", signal.SIGKILL),
    "terminate": _signals("terminate", signal.SIGTERM),
    "interrupt": _signals("interrupt", signal.SIGINT),
    "hang up": _signals("hang up", signal.SIGHUP),
    "short stop": _signals("short stop", signal.SIGSTOP, signal.SIGCONT, pauses=lambda limit: (0.1, limit / 3)),
    "long stop": _signals("long stop", signal.SIGSTOP, signal.SIGCONT, pauses=lambda limit: (limit + 5, limit + 30)),
    "full disk": _file_limit,
    "slow disk": _hook("slow disk", fatal=False, seconds=(0.02, 0.3), alone=True),
    "hang": _hook("hang", fatal=True),
    "lost message": _hook("lost message", fatal=True),
    "late message": _hook("late message", fatal=False, seconds=(0.1, 3.0)),
    "cut connections": _hook("cut connections", fatal=True),
}


def draw_fault(chance: random.Random, job: Job, timeout: float, kinds: Iterable[str] = FAULTS) -> Fault:
    """Draw a fault that can happen to a job."""
    found = None
    while found is None:
        found = FAULTS[chance.choice(sorted(kinds))](chance, job, timeout)
    return found
