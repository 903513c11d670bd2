"""Faults inside a process of a job, from the environment variable PETRA_SOAK_HOOK.

`PETRA_SOAK_HOOK=kind:process:tick:seconds:file` makes one process fail once, in one of its ticks, and creates the file
when it does. The kinds are those of `HOOKS`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from petra.distributed import ProcessTransport
from petra.pipeline import Stage
from petra.runs.run import Run
from petra.schedule import Action
from petra.trainer.trainer import Trainer

VARIABLE = "PETRA_SOAK_HOOK"


def install() -> None:
    """Let the run of this process fail as the environment says."""
    if text := os.environ.get(VARIABLE):
        kind, process, tick, seconds, file = text.split(":", 4)
        if os.environ.get("RANK", "0") == process:
            Run.on_start.append(lambda run: _fail_at(run.trainer, int(tick), kind, float(seconds), Path(file)))


def _fail_at(trainer: Trainer, at: int, kind: str, seconds: float, file: Path) -> None:
    def observe(tick: int, action: Action, stage: Stage) -> None:
        if tick >= at and not file.exists():  # a replacement of this process does not fail again
            file.touch()
            HOOKS[kind](trainer, seconds)

    trainer.executor.observers.append(observe)


def _hang(trainer: Trainer, seconds: float) -> None:
    """Compute forever."""
    while True:
        time.sleep(1.0)


def _slow_disk(trainer: Trainer, seconds: float) -> None:
    """Let every later write to the disk take long."""
    sync = os.fsync

    def slow(descriptor: Any) -> None:
        time.sleep(seconds)
        sync(descriptor)

    os.fsync = slow


def _once(trainer: Trainer, instead: Callable[[Callable[[], Callable[[], None]]], Callable[[], None]]) -> None:
    """Do something else with the next message than to send it."""
    transport = trainer.transport
    assert isinstance(transport, ProcessTransport)
    post = transport.groups.post_send

    def changed(to: int, pieces: list[Tensor]) -> Callable[[], None]:
        transport.groups.post_send = post  # type: ignore[method-assign]
        return instead(lambda: post(to, pieces))

    transport.groups.post_send = changed  # type: ignore[method-assign]


def _lose(trainer: Trainer, seconds: float) -> None:
    """Lose the next message."""
    _once(trainer, lambda send: lambda: None)


def _delay(trainer: Trainer, seconds: float) -> None:
    """Send the next message late."""

    def late(send: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        time.sleep(seconds)
        return send()

    _once(trainer, late)


def disconnect(*_: object) -> None:
    """Cut all connections of this process, but not those that it shares with its parent, if it was forked."""
    shared = set(_sockets(os.getppid()).values())
    for number, name in _sockets(os.getpid()).items():
        if name not in shared:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if connection.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                    connection.shutdown(socket.SHUT_RDWR)


def _sockets(pid: int) -> dict[int, str]:
    """Return the sockets of a process, by the numbers of their file descriptors."""
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if (name := os.readlink(path)).startswith("socket:"):
                found[int(path.name)] = name
    return found


HOOKS: dict[str, Callable[[Trainer, float], None]] = {
    "hang": _hang,
    "slow disk": _slow_disk,
    "lost message": _lose,
    "late message": _delay,
    "cut connections": disconnect,
}
