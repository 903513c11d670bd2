"""Writes metrics as lines of JSON, and for TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any


class MetricsLog:
    """Appends records to a file.

    Args:
        path: The file; None writes nothing, because another process does.
        keep_bytes: The length to truncate the file to, so that a resumed run drops what came after its checkpoint.
        tensorboard: A folder for TensorBoard, or None.
        step: The step of the checkpoint.
    """

    def __init__(self, path: Path | None, keep_bytes: int = 0, tensorboard: Path | None = None, step: int = 0) -> None:
        self._file: IO[bytes] | None = None
        self._board: Any = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(min(keep_bytes, path.stat().st_size))
        self._file.seek(0, os.SEEK_END)  # truncating does not move the position
        if tensorboard is not None:
            # TensorBoard no longer shows what was written after the checkpoint.
            self._board = tensorboard_writer()(str(tensorboard), purge_step=step + 1)

    @property
    def size(self) -> int:
        """Bytes written so far, which a checkpoint stores."""
        return self._file.tell() if self._file is not None else 0

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Append a record; numbers also go to TensorBoard."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **record}).encode() + b"\n")
        self._file.flush()
        if self._board is not None:
            for name, value in record.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def tensorboard_writer() -> Any:
    """Return the class that writes for TensorBoard; raise ValueError if the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "--tensorboard needs a package that is not installed: pip install 'petra[tensorboard]'"
        ) from error
    return SummaryWriter
