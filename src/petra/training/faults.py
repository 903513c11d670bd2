"""Faults on purpose: a test tool for what happens when a rank dies, hangs, or cannot write.

``PETRA_FAULT=kill:1:17`` kills rank 1 in its tick 17. The kinds are ``kill``, ``hang`` (computes for ever), ``stop``
(the whole process stands still), ``corrupt`` (its next message changes on its way) and ``full-disk`` (from that tick
on its checkpoints fail half-way). A job that torchrun has started anew is spared.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor

from petra.execution import ProcessTransport, Stage
from petra.execution.job import restarts
from petra.schedule import Action
from petra.training import checkpoint
from petra.training.trainer import Trainer

KINDS = ("kill", "hang", "stop", "corrupt", "full-disk")


@dataclass(frozen=True)
class Fault:
    """What happens to which rank in which of its ticks."""

    kind: str
    rank: int
    tick: int

    @classmethod
    def from_environment(cls) -> Fault | None:
        """What ``PETRA_FAULT`` asks for."""
        text = os.environ.get("PETRA_FAULT")
        return cls.parse(text) if text and restarts() == 0 else None

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read ``kind:rank:tick``."""
        kind, _, place = text.partition(":")
        rank, _, tick = place.partition(":")
        if kind not in KINDS or not rank.isdigit() or not tick.isdigit():
            raise ValueError(f"PETRA_FAULT is {text!r}: give {'|'.join(KINDS)}:RANK:TICK, like kill:1:17")
        return cls(kind, int(rank), int(tick))


def fail_at(trainer: Trainer, fault: Fault) -> None:
    """Have the fault happen to ``trainer`` if it is of that rank, after its first action in that tick."""
    if trainer.transport.place.rank != fault.rank:
        return
    struck = False

    def strike(tick: int, action: Action, stage: Stage) -> None:
        nonlocal struck
        if not struck and tick >= fault.tick:
            struck = True
            _strike(trainer, fault.kind)

    trainer.executor.observers.append(strike)


def _strike(trainer: Trainer, kind: str) -> None:
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
    elif kind == "full-disk":
        checkpoint.write_atomically = _fill(checkpoint.write_atomically)  # type: ignore[assignment]


def _corrupt_next(transport: ProcessTransport) -> None:
    post = transport._post

    def damaged(to: int, message: list[Tensor]) -> Callable[[], None]:
        data = message[-1].clone()
        data.view(-1).view(torch.uint8)[data.numel() // 3] += 1
        transport._post = post  # type: ignore[method-assign]
        return post(to, [*message[:-1], data])

    transport._post = damaged  # type: ignore[method-assign]


class _Full:
    """A file on a disk with room for a little."""

    def __init__(self, file: IO[bytes], room: int = 500) -> None:
        self._file, self._room = file, room

    def write(self, data: bytes) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _fill(
    write_atomically: Callable[[Path, Callable[[IO[bytes]], object]], None],
) -> Callable[[Path, Callable[[IO[bytes]], object]], None]:
    def full(path: Path, write: Callable[[IO[bytes]], object]) -> None:
        write_atomically(path, lambda file: write(cast(IO[bytes], _Full(file))))

    return full
