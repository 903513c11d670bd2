"""Writes metrics as lines of JSON, and restores lost ones from a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from petra.formatting import counted, first_line
from petra.trainer.checkpoint import write_bytes

DAMAGED = "metrics.damaged.jsonl"
"""The name that a damaged file is kept under."""
MOST_EVALUATIONS = 1000
"""The evaluations whose records a checkpoint stores, the newest ones."""


@dataclass(frozen=True)
class MetricsState:
    """The metrics file at a checkpoint."""

    keep_bytes: int = 0
    """Its length."""
    sha256: str | None = None
    """Its SHA-256; None in a checkpoint of an older version, whose file is not checked."""
    evaluations: Sequence[str] = ()
    """The lines of the newest evaluations."""

    @classmethod
    def of_checkpoint(cls, saved: Mapping[str, Any]) -> MetricsState:
        """Return what a checkpoint says about the metrics file."""
        if "metrics" not in saved:
            return cls(int(saved["metrics_bytes"]))
        return cls(**saved["metrics"])


class MetricsLog:
    """Appends records to a file.

    A file that is not the one of the checkpoint is replaced by the evaluations that the checkpoint stores; `problem`
    says so then.

    Args:
        path: The file; None writes nothing, because another process does.
        keep_bytes: The length to truncate the file to, so that a resumed run drops what came after its checkpoint.
        sha256: The hash of the file up to there; None checks nothing.
        evaluations: The lines of evaluations that the checkpoint stores.
    """

    def __init__(
        self, path: Path | None, keep_bytes: int = 0, sha256: str | None = None, evaluations: Sequence[str] = ()
    ) -> None:
        self.problem: str | None = None
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self._evaluations = deque(evaluations, MOST_EVALUATIONS)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        found = path.read_bytes() if path.exists() else None
        kept = (found or b"")[:keep_bytes]
        if sha256 is not None and hashlib.sha256(kept).hexdigest() != sha256:
            kept = "".join(evaluations).encode()
            self.problem = _replace(path, found, kept, len(evaluations), complete=len(kept) == keep_bytes)
        self._digest.update(kept)
        self._file = path.open("ab")
        self._file.truncate(len(kept))
        self._file.seek(0, os.SEEK_END)  # truncating does not move the position

    @property
    def state(self) -> MetricsState:
        """The file as it is now, which a checkpoint stores."""
        size = self._file.tell() if self._file is not None else 0
        return MetricsState(size, self._digest.hexdigest(), list(self._evaluations))

    def write(self, record: dict[str, Any], evaluation: bool = False) -> None:
        """Append a record; checkpoints store those of an `evaluation`."""
        if self._file is None:
            return
        line = json.dumps(record) + "\n"
        if evaluation:
            self._evaluations.append(line)
        self._digest.update(line.encode())
        self._file.write(line.encode())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _replace(path: Path, found: bytes | None, new: bytes, evaluations: int, complete: bool) -> str:
    """Write the evaluations of a checkpoint instead of a damaged file; return a message about it."""
    if found is not None:
        write_bytes(path.with_name(DAMAGED), found)
    write_bytes(path, new)
    state = "was missing" if found is None else f"was damaged or edited (it is now {DAMAGED})"
    rest = "" if complete else "; other records are lost"
    return f"{path} {state}: {counted(evaluations, 'evaluation')} restored from the checkpoint{rest}"


def parse_records(file: Path, content: bytes, remedy: str) -> list[dict[str, Any]]:
    """Parse a file of JSON lines.

    Args:
        file: The file.
        content: Its contents.
        remedy: What to do if it is damaged, for the error.

    Returns:
        The records.

    Raises:
        ValueError: If a line is damaged.
    """
    found: list[dict[str, Any]] = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            value = json.loads(line.decode())
            if not isinstance(value, dict):
                raise ValueError("it is no record")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is damaged in line {number} ({first_line(error)}): {remedy}") from error
        found.append(value)
    return found
