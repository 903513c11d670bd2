"""Checkpoints: complete or not there, written by all ranks together, and safe to load."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor

from petra.distributed import Transport
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


class Checkpoints:
    """The checkpoints of a run in one folder; the last complete one counts.

    Each is a folder: `run.pt` with the state of the whole run, and `stage0.pt`, `stage1.pt`, …, each written by the
    rank that holds the stage, and for further replicas `stage0.replica1.pt` with the micro-batches in flight there.
    `latest.json` names the last one that all ranks have written. It changes in one step, then older ones are removed.

    Args:
        folder: The folder of all checkpoints.
        transport: Connects the ranks of the run.
        ignore_existing: Do not count the checkpoints that are there.
    """

    def __init__(self, folder: Path, transport: Transport, ignore_existing: bool = False) -> None:
        self.folder, self._transport = folder, transport
        self._number = 0 if ignore_existing else self._latest() or 0

    def exist(self) -> bool:
        """Return whether there is a checkpoint to resume from; raise ValueError if ranks see different ones."""
        self._transport.check_agreement({"a last checkpoint": self._number or None})
        return self._number > 0

    def have_changed(self) -> bool:
        """Return whether another process has written a checkpoint since this object last read or wrote one."""
        return (self._latest() or 0) != self._number

    def save(self, run: dict[str, Any], stages: dict[int, dict[str, Any]]) -> None:
        """Write a checkpoint; all ranks call it together.

        Args:
            run: The state of the whole run, which the main rank writes.
            stages: The states of the stages of this rank, by index.

        Raises:
            OSError: If a rank could not write its part.
        """
        position = self._transport.position
        folder = self.folder / _name(self._number + 1)
        problem, names = None, []
        try:
            for index, state in stages.items():
                shared = state if position.replica == 0 else {"flight": state["flight"]}
                names.append(_stage(index, position.replica))
                save(folder / names[-1], shared)
            if position.is_main:
                save(folder / RUN, run)
        except OSError as error:
            problem = error.strerror or str(error)
        reports = self._transport.gather([problem, names])  # after this, all ranks have written theirs
        for other, (text, written) in zip(self._transport.positions(), reports, strict=True):
            if text is None and position.is_main and not all((folder / name).exists() for name in written):
                text = f"it is not in {folder} here: give all ranks the same folder, on a shared disk"
            if text is not None:
                who = f"{other}: " if len(reports) > 1 else ""
                kept = "; the one before it is kept" if self._number else ""
                raise OSError(f"{who}the checkpoint could not be written ({text}){kept}")
        self._number += 1
        if position.is_main:
            write_json(self.folder / LATEST, {"format": FORMAT, "name": folder.name})
            self.remove_older()

    def remove_older(self) -> None:
        """Remove the checkpoints before the last one; some are left if a run was killed while it removed them."""
        for old in _all(self.folder):
            if old.name < _name(self._number):  # other ranks may already be writing the next one
                remove_checkpoint(old)

    def run(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Load the state of the whole run from the last checkpoint."""
        return self._load(RUN, device)

    def stage(self, index: int, replica: int = 0, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Load a stage from the last checkpoint: its weights, and the micro-batches in flight in a replica."""
        found = self._load(_stage(index, 0), device)
        if replica > 0:
            found["flight"] = self._load(_stage(index, replica), device)["flight"]
        return {"weights": found["weights"], "flight": found["flight"]}

    def _load(self, name: str, device: torch.device | str) -> dict[str, Any]:
        try:
            return load(self.folder / _name(self._number) / name, device)
        except FileNotFoundError:
            if self.have_changed():  # a newer one replaces older ones
                run = self.folder.parent
                raise ValueError(f"another process is training in {run}: wait until it ends to --resume it") from None
            folder = self.folder / _name(self._number)
            missing = f"{name} of the last checkpoint is not in {folder}, which {LATEST} names: restore it"
            raise ValueError(f"{missing}, or remove {self.folder} to start again") from None
        except ValueError as error:
            raise ValueError(f"{error}, or remove {self.folder} to start again") from error

    def _latest(self) -> int | None:
        path = self.folder / LATEST
        there = [folder.name for folder in _all(self.folder)]
        remedy = (
            f'write {{"format": {FORMAT}, "name": "{there[-1]}"}} into it to continue from there'
            if there
            else "remove it"
        )
        if not path.exists():
            # The first one may be incomplete. Later ones follow a complete one, which this file names.
            if there and there[-1] > _name(1):
                raise ValueError(f"{path} is missing, but {self.folder / there[-1]} is there: {remedy}")
            return None
        try:
            written = json.loads(path.read_text())
            if written["format"] != FORMAT:
                raise ValueError(f"format {written['format']}")
            return int(written["name"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged or of another version ({error}): {remedy}, or --overwrite the run"
            ) from error


LATEST, RUN = "latest.json", "run.pt"


def _name(number: int) -> str:
    return f"{number:06d}"


def _all(folder: Path) -> list[Path]:
    """The checkpoints in a folder, complete or not, the oldest first; other folders there are ignored."""
    return sorted(path for path in folder.glob("[0-9]" * len(_name(0))) if path.is_dir())


def _stage(index: int, replica: int) -> str:
    return f"stage{index}.pt" if replica == 0 else f"stage{index}.replica{replica}.pt"


def remove_checkpoint(folder: Path) -> None:
    """Remove one checkpoint, and no other files."""
    for path in folder.glob("*.pt*"):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # it holds other files
        folder.rmdir()


def remove_all(folder: Path) -> None:
    """Remove all checkpoints of a run."""
    if folder.is_dir():
        for path in folder.glob(f"{LATEST}*"):  # and a temporary file of a run that was killed
            path.unlink()
        for path in _all(folder):
            remove_checkpoint(path)
        with suppress(OSError):
            folder.rmdir()


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
