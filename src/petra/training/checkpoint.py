"""Checkpoints: whole or not at all, written by all ranks together, and safe to load."""

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

from petra.errors import first_line
from petra.execution import Transport

FORMAT = 2


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
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
    write_atomically(path, lambda file: write_state(file, state))


def write_state(file: IO[bytes], state: dict[str, Any]) -> None:
    """Write into an open file; what fails there is raised as what it is."""
    problems: list[OSError] = []
    try:
        torch.save({"format": FORMAT, **state}, cast(IO[bytes], _Noting(file, problems)))
    except RuntimeError as error:  # what torch makes of a full disk
        raise (problems[0] if problems else error) from None


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read what `save` wrote. Nothing in the file is executed."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {path}: check the path")
    try:
        with zipfile.ZipFile(path) as archive:  # PyTorch writes checksums, and does not look at them
            if (part := archive.testzip()) is not None:
                raise ValueError(f"{part} is damaged")
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises many kinds for broken files
        reason = first_line(error)
        raise ValueError(f"{path} is not a whole checkpoint ({reason}): put back a copy") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of this version of Petra: it wants format {FORMAT}")
    return state


class _Noting:
    """A file that remembers why a write failed."""

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
    """The checkpoints of a run in one folder, of which the last whole one counts.

    Each is a folder of its own: ``run.pt`` with what concerns all, and ``stage0.pt``, ``stage1.pt``, … each written by
    the rank that holds the stage, and for further replicas ``stage0.replica1.pt`` with what is in flight there.
    ``latest.json`` names the last one that all ranks have written; it changes in one step, then older ones go.
    With ``anew``, those that are there do not count.
    """

    def __init__(self, folder: Path, transport: Transport, anew: bool = False) -> None:
        self._folder, self._transport = folder, transport
        self._number = 0 if anew else self._latest() or 0

    def exist(self) -> bool:
        """Whether there is one to resume from; all ranks have to see the same."""
        self._transport.agree({"a last checkpoint": self._number or None})
        return self._number > 0

    def have_changed(self) -> bool:
        """Whether another process has written one since."""
        return (self._latest() or 0) != self._number

    def save(self, run: dict[str, Any], stages: dict[int, dict[str, Any]]) -> None:
        """Write a checkpoint, called by all ranks at once; ``run`` is taken from the one that speaks."""
        place = self._transport.place
        folder = self._folder / _name(self._number + 1)
        problem, names = None, []
        try:
            for index, state in stages.items():
                shared = state if place.replica == 0 else {"flight": state["flight"]}
                names.append(_stage(index, place.replica))
                save(folder / names[-1], shared)
            if place.speaks:
                save(folder / RUN, run)
        except OSError as error:
            problem = error.strerror or str(error)
        said = self._transport.gather([problem, names])  # after this, all have written theirs
        for other, (text, written) in zip(self._transport.places(), said, strict=True):
            if text is None and place.speaks and not all((folder / name).exists() for name in written):
                text = f"it is not in {folder} here: give all ranks the same folder, on a disk that they share"
            if text is not None:
                who = f"{other}: " if len(said) > 1 else ""
                kept = "; the one before it is kept" if self._number else ""
                raise OSError(f"{who}the checkpoint could not be written ({text}){kept}")
        self._number += 1
        if place.speaks:
            write_json(self._folder / LATEST, {"format": FORMAT, "name": folder.name})
            self.remove_older()

    def remove_older(self) -> None:
        """Remove those before the last one, which are there still if a run was killed just then."""
        for old in _all(self._folder):
            if old.name < _name(self._number):  # others may be writing the next one already
                remove_checkpoint(old)

    def run(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """What the last checkpoint says about the whole run."""
        return self._load(RUN, device)

    def stage(self, index: int, replica: int = 0, device: torch.device | str = "cpu") -> dict[str, Any]:
        """A stage in the last checkpoint: its weights, and what is in flight in a replica."""
        found = self._load(_stage(index, 0), device)
        if replica > 0:
            found["flight"] = self._load(_stage(index, replica), device)["flight"]
        return {"weights": found["weights"], "flight": found["flight"]}

    def _load(self, name: str, device: torch.device | str) -> dict[str, Any]:
        try:
            return load(self._folder / _name(self._number) / name, device)
        except FileNotFoundError:
            if self.have_changed():  # by a newer one, which older ones make room for
                run = self._folder.parent
                raise ValueError(f"another process is training in {run}: wait for its end to --resume it") from None
            missing = f"{name} of the last checkpoint is not in {self._folder}: put it back"
            raise ValueError(f"{missing}, or remove {self._folder} to begin anew") from None
        except ValueError as error:
            raise ValueError(f"{error}, or remove {self._folder} to begin anew") from error

    def _latest(self) -> int | None:
        path = self._folder / LATEST
        there = [folder.name for folder in _all(self._folder)]
        mend = (
            f'write {{"format": {FORMAT}, "name": "{there[-1]}"}} into it to go on from there' if there else "remove it"
        )
        if not path.exists():
            # The first one may have been cut off. Later ones follow one that is whole, which this file names.
            if there and there[-1] > _name(1):
                raise ValueError(f"{path} is not there, but {self._folder / there[-1]} is: {mend}")
            return None
        try:
            written = json.loads(path.read_text())
            if written["format"] != FORMAT:
                raise ValueError(f"format {written['format']}")
            return int(written["name"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged or of another version ({error}): {mend}, or --overwrite the run"
            ) from error


LATEST, RUN = "latest.json", "run.pt"


def _name(number: int) -> str:
    return f"{number:06d}"


def _all(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whole or not, the oldest first; nothing else that somebody has put there."""
    return sorted(path for path in folder.glob("[0-9]" * len(_name(0))) if path.is_dir())


def _stage(index: int, replica: int) -> str:
    return f"stage{index}.pt" if replica == 0 else f"stage{index}.replica{replica}.pt"


def remove_checkpoint(folder: Path) -> None:
    """Remove one checkpoint, and nothing that is not a part of one."""
    for path in folder.glob("*.pt*"):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # something of somebody else's is in there
        folder.rmdir()


def remove_all(folder: Path) -> None:
    """Remove all checkpoints of a run."""
    if folder.is_dir():
        for path in folder.glob(f"{LATEST}*"):  # with one that was being written when the run was killed
            path.unlink()
        for path in _all(folder):
            remove_checkpoint(path)
        with suppress(OSError):
            folder.rmdir()


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON, whole or not at all."""
    text = json.dumps(value, indent=2) + "\n"

    def write(file: IO[bytes]) -> None:
        file.write(text.encode())

    write_atomically(path, write)


def export_weights(network: Mapping[str, Tensor], path: Path) -> None:
    """Write weights as safetensors under the network's own names; they load without Petra."""
    # Copies, for safetensors takes no two names of one memory, which layers that share weights have.
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in network.items()}

    def write(file: IO[bytes]) -> None:
        file.write(to_safetensors(tensors))

    write_atomically(path, write)
