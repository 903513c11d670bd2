"""What should happen after a fault: the one place that says it."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import Enum

from soak.faults import Fault
from soak.jobs import Job

STOPPED = 130
"""The exit code after SIGINT and SIGTERM."""


class Outcome(Enum):
    """How a job has met a fault."""

    RECOVERED = "went on"
    """It ended with its result, by itself."""
    ENDED = "ended"
    """It ended with an error that names what is wrong, and has to be resumed."""
    MISSED = "too late"
    """It had ended before the fault."""
    FAILED = "failed"
    """Neither."""


@dataclass(frozen=True)
class Verdict:
    """An outcome, and what is wrong if it failed."""

    outcome: Outcome
    reason: str = ""


def judge(fault: Fault, job: Job, happened: bool, code: int | None, said: str) -> Verdict:
    """Say how a job has met a fault.

    A job may always go on by itself: whether it computed the right thing is decided by its weights. It may end where
    the fault is fatal, with one line about the reason, which names the process if one of several is lost.

    Args:
        fault: The fault.
        job: The job.
        happened: Whether the fault happened while the job was running.
        code: The exit code of the command; None if it did not end in time.
        said: What all processes printed.
    """
    errors = [line for line in said.splitlines() if line.startswith("petra: error")]
    if code is None:
        return Verdict(Outcome.FAILED, "did not end")
    if "Traceback" in said:
        return Verdict(Outcome.FAILED, "printed a traceback")
    if any(re.match(r"petra: error: \w+(Error|Exception):", line) for line in errors):
        return Verdict(Outcome.FAILED, "printed the name of an exception")
    if code == 0:
        return Verdict(Outcome.RECOVERED if happened else Outcome.MISSED)
    if not happened:
        return Verdict(Outcome.FAILED, f"ended with {code} before the fault")
    if not fault.fatal:
        return Verdict(Outcome.FAILED, f"ended with {code}, but had to go on")
    # A process without any connection cannot know whether another one has reported the failure.
    if len(errors) > (2 if fault.kind == "cut connections" else 1):
        return Verdict(Outcome.FAILED, f"printed {len(errors)} errors")
    main = "launcher" if job.processes > 1 else "process 0"
    if code < 0:  # the command itself was ended
        ends = fault.target == main and fault.kind in ("kill", "terminate", "interrupt", "hang up")
        return Verdict(Outcome.ENDED) if ends else Verdict(Outcome.FAILED, f"ended by {signal.Signals(-code).name}")
    if code == STOPPED:
        asked = fault.kind in ("terminate", "interrupt")
        return Verdict(Outcome.ENDED) if asked else Verdict(Outcome.FAILED, "stopped, but was not asked to")
    if not said.strip():
        return Verdict(Outcome.FAILED, f"ended with {code} and said nothing")
    if job.processes > 1 and fault.target.startswith("process") and not _names(fault, job, said):
        return Verdict(Outcome.FAILED, f"does not name {fault.target}")
    return Verdict(Outcome.ENDED)


def _names(fault: Fault, job: Job, said: str) -> bool:
    """Return whether a message names the process, or the one that a message of it did not reach."""
    if fault.kind in ("lost message", "cut connections"):
        return any(word in said for word in ("rank ", "message "))
    number = int(fault.target.split()[-1])
    rank, replica = divmod(number, job.replicas)
    name = f"rank {rank}" + (f" of replica {replica}" if job.replicas > 1 else "")
    return name in said or f"process {number}" in said
