"""Files that are complete or not there, and states of tensors in them, which are safe to load."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor

from petra.formatting import first_line

FORMAT = 1


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file that replaces `path` in one step.

    A crash at any moment leaves the old file intact; the new one is on disk before it replaces it.

    Args:
        path: The file.
        write: Writes the contents into an open file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save(path: Path, state: dict[str, Any]) -> None:
    """Save a state of tensors and plain values."""
    write_atomically(path, lambda file: write_state(file, state))


def write_state(file: IO[bytes], state: dict[str, Any]) -> None:
    """Save into an open file; raise the OSError of a failed write, which PyTorch would hide."""
    problems: list[OSError] = []
    try:
        torch.save({"format": FORMAT, **state}, cast(IO[bytes], _ErrorRecorder(file, problems)))
    except RuntimeError as error:  # PyTorch's error for a full disk
        raise (problems[0] if problems else error) from None


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Load what `save` wrote. Nothing in the file is executed.

    Args:
        path: The file.
        device: The device of the tensors.

    Returns:
        The state.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {path}: check the path")
    try:
        with zipfile.ZipFile(path) as archive:  # PyTorch writes checksums, but does not check them
            if (part := archive.testzip()) is not None:
                raise ValueError(f"{part} is damaged")
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises many kinds for broken files
        reason = first_line(error)
        raise ValueError(f"{path} is not a complete checkpoint ({reason}): restore a copy") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of this version of Petra (format {FORMAT}): restore a copy")
    return state


class _ErrorRecorder:
    """A file that records why a write failed."""

    def __init__(self, file: IO[bytes], problems: list[OSError]) -> None:
        self._file, self._problems = file, problems

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self._problems.append(error)
            raise

    def flush(self) -> None:
        self._file.flush()


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON in one step."""
    write_bytes(path, to_json_bytes(value))


def to_json_bytes(value: Any) -> bytes:
    """Return the contents of a file with indented JSON."""
    return (json.dumps(value, indent=2) + "\n").encode()


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file in one step."""
    write_atomically(path, lambda file: file.write(content))


def export_weights(network: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write weights as safetensors under their names in the network; they can be loaded without Petra."""
    # Copies, because safetensors rejects tensors that share memory, as those of layers with shared weights do.
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in network.items()}

    def write(file: IO[bytes]) -> None:
        file.write(to_safetensors(tensors, metadata))

    write_atomically(path, write)
