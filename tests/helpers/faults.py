"""Fault injection: a rank dies, hangs, or cannot write.

`PETRA_FAULT=kill:1:17` kills rank 1 in its tick 17; several faults are separated by commas. The kinds are `kill`,
`kill-start` (after it has written the first files), `kill-restore` (while it restores the state after the first
recovery), `hang` (computes forever), `stop` (SIGSTOP for the whole process), `corrupt` (changes its next message on the
way), `cut` (shuts down all its connections), `full-disk` (from that tick on, writing checkpoints fails) and `slow-disk`
(from that tick on, it takes a second per file). A job that torchrun has restarted has no fault, nor has a process that
replaces a lost one.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from soak.hooks import disconnect
from torch import Tensor

from petra.distributed import ProcessTransport
from petra.distributed.job import restart_count
from petra.distributed.membership import is_replacement
from petra.pipeline import Stage
from petra.pipeline.message_layout import HEADER_BYTES
from petra.runs import run as run_module
from petra.runs.run import Run
from petra.schedule import Action
from petra.trainer import checkpoint
from petra.trainer.trainer import Trainer

KINDS = ("kill", "kill-start", "kill-restore", "hang", "stop", "corrupt", "cut", "full-disk", "slow-disk")


@dataclass(frozen=True)
class Fault:
    """A fault of one rank in one of its ticks."""

    kind: str
    rank: int
    tick: int

    @classmethod
    def from_environment(cls) -> list[Fault]:
        """The faults in `PETRA_FAULT`."""
        text = os.environ.get("PETRA_FAULT")
        if not text or restart_count() > 0 or is_replacement():
            return []
        return [cls.parse(one) for one in text.split(",")]

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read `kind:rank:tick`."""
        kind, _, position = text.partition(":")
        rank, _, tick = position.partition(":")
        if kind not in KINDS or not rank.isdigit() or not tick.isdigit():
            raise ValueError(f"PETRA_FAULT is {text!r}: give {'|'.join(KINDS)}:RANK:TICK, like kill:1:17")
        return cls(kind, int(rank), int(tick))


def install() -> None:
    """Let runs in this process fail as `PETRA_FAULT` says."""
    if faults := Fault.from_environment():
        started: list[Run] = []

        def start(run: Run) -> None:
            for fault in faults if not started else ():  # not after a recovery
                if fault.kind == "kill-restore":
                    kill_in_restore(fault.rank, run.transport.position.rank)
                elif fault.kind != "kill-start":
                    fail_at(run.trainer, fault)
            started.append(run)

        Run.on_start.append(start)
        for fault in faults:
            if fault.kind == "kill-start":
                kill_after_first_files(fault.rank)


def kill_after_first_files(rank: int) -> None:
    """Kill the process that is the rank when it has written the first files of a run."""
    prepare_folder = Run._prepare_folder

    def prepare(run: Run, *given: Any, **named: Any) -> None:
        prepare_folder(run, *given, **named)
        if run.transport.position.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    Run._prepare_folder = prepare  # type: ignore[method-assign]


def kill_in_restore(rank: int, own: int) -> None:
    """Kill this process when it restores a state, if it is that of the rank."""
    if own == rank:
        run_module.restore = lambda *given: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,misc]


def fail_at(trainer: Trainer, fault: Fault) -> None:
    """Let `trainer` fail if it is that of the rank, after its first action in the tick."""
    if trainer.transport.position.rank != fault.rank:
        return
    failed = False

    def observe(tick: int, action: Action, stage: Stage) -> None:
        nonlocal failed
        if not failed and tick >= fault.tick:
            failed = True
            _fail(trainer, fault.kind)

    trainer.executor.observers.append(observe)


def _fail(trainer: Trainer, kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hang":
        while True:
            time.sleep(1.0)
    elif kind == "corrupt":
        assert isinstance(trainer.transport, ProcessTransport)
        _corrupt_next(trainer.transport)
    elif kind == "cut":
        disconnect()
    elif kind == "full-disk":
        checkpoint.write_atomically = _fill(checkpoint.write_atomically)  # type: ignore[assignment]
    elif kind == "slow-disk":
        checkpoint.write_atomically = before_writing(lambda path: time.sleep(1.0))  # type: ignore[assignment]


def _corrupt_next(transport: ProcessTransport) -> None:
    post = transport.groups.post_send

    def damaged(to: int, pieces: list[Tensor]) -> Callable[[], None]:
        (message,) = pieces
        message[HEADER_BYTES + 1] += 1
        transport.groups.post_send = post  # type: ignore[method-assign]
        return post(to, pieces)

    transport.groups.post_send = damaged  # type: ignore[method-assign]


class FullDisk:
    """A file on a disk that is almost full."""

    def __init__(self, file: IO[bytes], room: int = 500) -> None:
        self._file, self._room = file, room

    def write(self, data: bytes) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def before_writing(
    wait: Callable[[Path], object],
) -> Callable[[Path, Callable[[IO[bytes]], object]], None]:
    """`write_atomically` after a call of ``wait`` with the path of the file."""
    write_atomically = checkpoint.write_atomically

    def slow(path: Path, write: Callable[[IO[bytes]], object]) -> None:
        wait(path)
        write_atomically(path, write)

    return slow


def _fill(
    write_atomically: Callable[[Path, Callable[[IO[bytes]], object]], None],
) -> Callable[[Path, Callable[[IO[bytes]], object]], None]:
    def full(path: Path, write: Callable[[IO[bytes]], object]) -> None:
        write_atomically(path, lambda file: write(cast(IO[bytes], FullDisk(file))))

    return full
