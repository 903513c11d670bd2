"""One trial: a job with one to three faults, resumed until it has finished, then compared with an unbroken run."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from soak.expectations import Outcome, Verdict, judge
from soak.faults import FAULTS, Fault, draw_fault
from soak.jobs import JOBS, Attempt, Job
from soak.leftovers import leftovers, remove_temporary_files, store_ports, temporary_files, unexpected_files

WEIGHTS = "weights.safetensors"
RESUMES = 2
"""Attempts without a fault that a job has to finish."""


@dataclass(frozen=True)
class Event:
    """A fault, and what became of it."""

    fault: Fault
    verdict: Verdict
    seconds: float
    """From the fault to the end of the attempt."""


@dataclass
class Trial:
    """A job and its faults, drawn from a seed and a number."""

    seed: int
    number: int
    job: Job
    faults: list[Fault]
    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def draw(
        cls, seed: int, number: int, timeout: float, jobs: Iterable[str] = JOBS, kinds: Iterable[str] = FAULTS
    ) -> Trial:
        """Draw one; the same for the same arguments."""
        chance = random.Random(f"{seed}:{number}")
        job = JOBS[chance.choice(sorted(jobs))]
        return cls(
            seed, number, job, [draw_fault(chance, job, timeout, kinds) for _ in range(chance.choice([1, 1, 2]))]
        )

    @property
    def failed(self) -> bool:
        """True if something went wrong."""
        return bool(self.problems)


class Soak:
    """Runs trials in a folder.

    Args:
        folder: The folder for all runs.
        timeout: The `--timeout` of the jobs.
        say: Prints a line.
        extra: More arguments of all jobs.
    """

    def __init__(self, folder: Path, timeout: float, say: Callable[[str], None], extra: Sequence[str] = ()) -> None:
        self.folder, self.timeout, self.extra = folder, timeout, extra
        self._say, self._began = say, time.monotonic()
        self._complete: dict[str, Path] = {}
        self._lock = threading.Lock()
        # A message that never comes ends a job after 60 s and four times the timeout at the latest.
        self._patience = 120.0 + 5 * timeout
        self.limit = self._patience
        """Seconds that every attempt has to end."""

    def complete(self, job: Job) -> Path:
        """Return the folder of an unbroken run of the job."""
        with self._lock:
            if job.name not in self._complete:
                place = self.folder / f"complete-{job.name}"
                attempt = Attempt(job, place, f"{place.name}-{self.folder.name}", self.timeout, extra=self.extra)
                if attempt.end(3 * self._patience) != 0:
                    raise RuntimeError(f"the unbroken run of job {job.name} failed: {attempt.said}")
                seconds = time.monotonic() - attempt.began
                self.limit = max(self.limit, self._patience + 5 * seconds)  # the machine may be busy
                self._complete[job.name] = place / "run"
                self._print(f"unbroken run of {job.name}: {seconds:.1f} s")
            return self._complete[job.name]

    def run(self, trial: Trial) -> None:
        """Do one trial."""
        complete = self.complete(trial.job)
        place = self.folder / str(trial.number)
        finished = False
        for i, fault in enumerate(trial.faults):
            if finished or trial.failed:
                break
            finished = self._with_fault(trial, fault, place, i)
        for i in range(RESUMES):
            if finished or trial.failed:
                break
            attempt = self._start(trial, place, f"resume{i}")
            code = attempt.end(self.limit)
            finished = code == 0
            if i + 1 == RESUMES and not finished:
                trial.problems.append(f"resumed, it ended with {code}: {_short(attempt.said)}")
            trial.problems += self._left(attempt, set())
        if not trial.failed:
            trial.problems += _compare(place / "run", complete)
        if trial.failed:
            self._print(f"{_name(trial)}: FAILED: {'; '.join(trial.problems)} (see {place})")
        else:
            shutil.rmtree(place)

    def _with_fault(self, trial: Trial, fault: Fault, place: Path, i: int) -> bool:
        """Start or continue the job, with a fault; return whether it finished."""
        attempt = self._start(trial, place, f"fault{i}", fault)
        try:
            happened = fault.happen(attempt)
            at, ports = time.monotonic(), store_ports(attempt)
            self._print(f"{_name(trial)}: {fault}" + ("" if happened else ": too late"))
            code = attempt.end(self.limit)
        finally:
            attempt.kill()
        verdict = judge(fault, trial.job, happened, code, attempt.said)
        event = Event(fault, verdict, time.monotonic() - at)
        trial.events.append(event)
        if verdict.outcome is Outcome.FAILED:
            trial.problems.append(f"{fault}: {verdict.reason}: {_short(attempt.said)}")
        worker_ended = fault.target == "worker" and verdict.outcome is Outcome.ENDED
        trial.problems += self._left(attempt, ports, worker_ended)
        how = verdict.outcome.value + (f" with {code}" if code else "")
        self._print(f"{_name(trial)}: {how} after {event.seconds:.1f} s: {_short(attempt.said)}")
        return code == 0

    def _start(self, trial: Trial, place: Path, name: str, fault: Fault | None = None) -> Attempt:
        environment = {} if fault is None else fault.environment(place)
        unique = f"{trial.number}-{name}-{self.folder.name}"
        attempt = Attempt(trial.job, place, unique, self.timeout, environment, self.extra)
        attempt.fault_limit = max(attempt.fault_limit, self.limit)  # longer on a machine that is busy
        return attempt

    def _left(self, attempt: Attempt, ports: set[int], worker_ended: bool = False) -> list[str]:
        found = [*leftovers(attempt, ports), *temporary_files(attempt, worker_ended)]
        remove_temporary_files(attempt)  # the next attempt must not be blamed for them
        return [f"left behind: {thing}" for thing in found]

    def _print(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._began:7.1f} s  {text}")


def _name(trial: Trial) -> str:
    return f"trial {trial.seed}:{trial.number} ({trial.job.name})"


def _short(said: str) -> str:
    lines = said.strip().splitlines()
    return " / ".join(line[:300] for line in [*lines[:1], *lines[1:][-2:]]) or "(nothing)"


def _compare(run: Path, complete: Path) -> list[str]:
    problems = [f"left behind: {name}" for name in unexpected_files(run, complete)]
    if not (run / WEIGHTS).exists() or (run / WEIGHTS).read_bytes() != (complete / WEIGHTS).read_bytes():
        problems.append("the weights are not those of the unbroken run")
    return problems
