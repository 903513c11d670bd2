"""Files of a run and their hashes: a file that is not what the run wrote is an error that names it.

`hashes.json` holds the length and the SHA-256 of every file of a run that decides a result or is reported, except for
weights, whose hashes are in `summary.json`, and checkpoints, which have their own checksums. A run of a version that
wrote no `hashes.json` is read without this check: it cannot be checked, and its next `--resume` writes the hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from petra.formatting import first_line
from petra.runs.run_folder import (
    CONFIG,
    FIDELITY,
    FIDELITY_SUMMARY,
    HASHES,
    METRICS,
    NETWORK,
    SUMMARY,
    TOKENIZER,
    TRACE,
    VOCABULARY,
)
from petra.trainer import checkpoint
from petra.trainer.metrics import parse_records

HASHED = (CONFIG, NETWORK, VOCABULARY, TOKENIZER, METRICS, SUMMARY, TRACE, FIDELITY, FIDELITY_SUMMARY)
"""The files that may be in `hashes.json`."""
GROWING = (METRICS, FIDELITY)
"""Files that may be longer than when they were hashed."""
CHANGED = f"is damaged or was edited (its hash is not the one in {HASHES})"
"""The state of a file that is not what the run wrote."""


class ChangedFile(ValueError):  # a problem of the user's files, like other ValueErrors
    """A file of a run is not what the run wrote."""


@dataclass(frozen=True)
class FileHash:
    """The contents of a file when it was hashed."""

    size: int
    """Its length."""
    sha256: str
    """Its SHA-256 in hexadecimal digits."""

    @classmethod
    def of(cls, content: bytes) -> FileHash:
        """Return the hash of the contents of a file."""
        return cls(len(content), hashlib.sha256(content).hexdigest())


def read_bytes(folder: Path, name: str, remedy: str) -> bytes:
    """Read a file of a run.

    Args:
        folder: The folder of the run.
        name: The name of the file.
        remedy: What to do if it is missing or damaged, for the error.

    Returns:
        Its contents.

    Raises:
        ChangedFile: If it is not what the run wrote.
        ValueError: If it is missing, or `hashes.json` is damaged.
    """
    file = folder / name
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: {remedy}") from None
    if not is_unchanged(folder, name, content):
        raise ChangedFile(f"{file} {CHANGED}: {remedy}")
    return content


def is_unchanged(folder: Path, name: str, content: bytes) -> bool:
    """Return whether a file has the hash that the run recorded, if any; raise ValueError if the hashes are damaged."""
    recorded = _read(folder).get(name)
    if recorded is None:
        return True
    return FileHash.of(content[: recorded.size] if name in GROWING else content) == recorded


def read_json(folder: Path, name: str, remedy: str, kind: type = dict) -> Any:
    """Read a JSON file of a run.

    Args:
        folder: The folder of the run.
        name: The name of the file.
        remedy: What to do if it is missing or damaged, for the error.
        kind: The type of the value in the file.

    Returns:
        The value.

    Raises:
        ChangedFile: If it is not what the run wrote.
        ValueError: If it is missing or damaged, or `hashes.json` is.
    """
    return parse_json(folder / name, read_bytes(folder, name, remedy), remedy, kind)


def read_lines(folder: Path, name: str, remedy: str) -> list[dict[str, Any]]:
    """Read a file of JSON lines of a run; arguments and errors are those of `read_bytes`."""
    return parse_records(folder / name, read_bytes(folder, name, remedy), remedy)


def parse_json(file: Path, content: bytes, remedy: str, kind: type = dict) -> Any:
    """Return the JSON value in the contents of a file; raise ValueError with its name if they are damaged."""
    try:
        value = json.loads(content.decode())
        if not isinstance(value, kind):
            raise ValueError(f"it holds {type(value).__name__}, not {kind.__name__}")
        return value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({first_line(error)}): {remedy}") from error


def write_files(folder: Path, contents: Mapping[str, bytes]) -> list[str]:
    """Write files of a run and their hashes.

    The hashes of files that change are removed first, so a crash in between leaves files without a hash, and no file
    with a wrong one.

    Args:
        folder: The folder of the run.
        contents: The contents of each file.

    Returns:
        The names of files that were missing or not what the run had written.
    """
    new = {name: FileHash.of(content) for name, content in contents.items()}
    damaged = _damaged(folder, contents)
    changed = [name for name in contents if not _holds(folder / name, contents[name])]
    update(folder, dict.fromkeys(changed))
    for name in changed:
        checkpoint.write_bytes(folder / name, contents[name])
    update(folder, new)
    return damaged


def _damaged(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the names of files that are missing or not what the run wrote."""
    try:
        recorded = _read(folder)
    except ValueError:  # damaged, and written again
        return []
    files = {name: folder / name for name in names if name in recorded}
    return [n for n, file in files.items() if not file.exists() or FileHash.of(file.read_bytes()) != recorded[n]]


def _holds(file: Path, content: bytes) -> bool:
    return file.exists() and file.read_bytes() == content


def update(folder: Path, changes: Mapping[str, FileHash | None]) -> None:
    """Change hashes in `hashes.json`.

    Args:
        folder: The folder of the run.
        changes: The new hash of each file; None removes it.
    """
    try:
        before = _read(folder)
    except ValueError:  # damaged: what it said is lost
        before = {}
    merged: dict[str, FileHash | None] = {**before, **changes}
    after = {name: found for name, found in merged.items() if found is not None}
    if after != before or not (folder / HASHES).exists():
        entries = {name: asdict(found) for name, found in after.items()}
        checkpoint.write_json(folder / HASHES, {"files": entries, "sha256": _hash_of(entries)})


def hash_files(folder: Path, names: Iterable[str]) -> None:
    """Record the hashes of files as they are now; of a missing file, remove it."""
    files = {name: folder / name for name in names}
    update(folder, {name: FileHash.of(file.read_bytes()) if file.exists() else None for name, file in files.items()})


def _read(folder: Path) -> dict[str, FileHash]:
    file = folder / HASHES
    if not file.exists():
        return {}
    remedy = "restore a copy, or remove it to read the files of the run unchecked"
    found = parse_json(file, file.read_bytes(), remedy)
    if found.get("sha256") != _hash_of(found.get("files")):
        raise ValueError(f"{file} is damaged (it does not match its own hash): {remedy}")
    try:
        return {name: FileHash(**entry) for name, entry in found["files"].items() if name in HASHED}
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{file} is of another version of Petra ({error}): {remedy}") from error


def _hash_of(entries: Any) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
