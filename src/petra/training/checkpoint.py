"""Checkpoints: whole or not at all, and safe to load."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save as to_safetensors
from torch import nn

FORMAT = 1


def write_atomically(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Let ``write`` fill a file that then takes the place of ``path`` in one step.

    A crash at any moment leaves the old file whole; the new one is on disk before it takes over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state of tensors and plain values."""
    write_atomically(path, lambda file: torch.save({"format": FORMAT, **state}, file))


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read what `save` wrote. Nothing in the file is executed."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {path}: check the path")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises many kinds for broken files
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"{path} is not a whole checkpoint ({reason}): remove it to start anew, or put back a copy"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of this version of Petra: it wants format {FORMAT}")
    return state


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON, whole or not at all."""
    text = json.dumps(value, indent=2) + "\n"

    def write(file: IO[bytes]) -> None:
        file.write(text.encode())

    write_atomically(path, write)


def export_weights(network: nn.Module, path: Path) -> None:
    """Write the weights as safetensors under the network's own names; they load without Petra."""
    # Copies, for safetensors takes no two names of one memory, which layers that share weights have.
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in network.state_dict().items()}

    def write(file: IO[bytes]) -> None:
        file.write(to_safetensors(tensors))

    write_atomically(path, write)
