"""Metrics as lines of JSON, and in TensorBoard if asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any


class MetricsLog:
    """Appends records to a file; a resumed run first forgets what came after its checkpoint, at ``step``."""

    def __init__(self, path: Path | None, keep_bytes: int = 0, tensorboard: Path | None = None, step: int = 0) -> None:
        self._file: IO[bytes] | None = None
        self._board: Any = None
        if path is None:  # another process writes them
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(min(keep_bytes, path.stat().st_size))
        self._file.seek(0, os.SEEK_END)  # truncating does not move the position
        if tensorboard is not None:
            # What is there from the next step on is not shown any more.
            self._board = board_writer()(str(tensorboard), purge_step=step + 1)

    @property
    def size(self) -> int:
        """Bytes written so far: what a checkpoint remembers."""
        return self._file.tell() if self._file is not None else 0

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Add a record; numbers also go to TensorBoard."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **record}).encode() + b"\n")
        self._file.flush()
        if self._board is not None:
            for name, value in record.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def board_writer() -> Any:
    """The class that writes for TensorBoard, or an error that helps."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("--tensorboard needs a package that is not there: pip install 'petra[tensorboard]'") from error
    return SummaryWriter
