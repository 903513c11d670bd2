"""Writes metrics as lines of JSON."""

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
    """

    def __init__(self, path: Path | None, keep_bytes: int = 0) -> None:
        self._file: IO[bytes] | None = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(min(keep_bytes, path.stat().st_size))
        self._file.seek(0, os.SEEK_END)  # truncating does not move the position

    @property
    def size(self) -> int:
        """Bytes written so far, which a checkpoint stores."""
        return self._file.tell() if self._file is not None else 0

    def write(self, record: dict[str, Any]) -> None:
        """Append a record."""
        if self._file is None:
            return
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
