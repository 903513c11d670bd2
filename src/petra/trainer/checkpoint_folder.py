"""The checkpoints of a run: complete or not there, and written by all ranks together while training goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petra.distributed import Transport
from petra.pipeline import Diverged
from petra.pipeline.host_state import HostBuffers, copy_to_host
from petra.trainer import checkpoint
from petra.trainer.checkpoint import FORMAT
from petra.trainer.checkpoint_writer import CheckpointWriter, NotShared

LATEST, RUN = "latest.json", "run.pt"


class Checkpoints:
    """The checkpoints of a run in one folder.

    Each is a folder: `run.pt` with the state of the whole run, and `stage0.pt`, `stage1.pt`, …, each written by the
    rank that holds the stage, and for further replicas `stage0.replica1.pt` with the micro-batches in flight there.
    `latest.json` names the last one that all ranks have written; those with larger numbers do not count. It changes in
    one step, then older ones are removed.

    Args:
        folder: The folder of all checkpoints.
        transport: Connects the ranks of the run.
        ignore_existing: Do not count the checkpoints that are there.
        keep: The number of checkpoints to keep.
        number: The checkpoint to read; None for the last one.

    Raises:
        ValueError: If there is no such checkpoint, or `latest.json` is damaged.
    """

    def __init__(
        self,
        folder: Path,
        transport: Transport,
        ignore_existing: bool = False,
        keep: int = 1,
        number: int | None = None,
    ) -> None:
        self.folder, self._transport, self._keep = folder, transport, keep
        self._number = self._seen = 0 if ignore_existing else self._latest() or 0
        if number is not None:
            complete = self._complete()
            if number not in complete:
                there = ", ".join(map(str, complete)) or "none"
                raise ValueError(f"checkpoint {number} is not in {folder}: it has {there}")
            self._number = number
        self._writer = CheckpointWriter(transport)
        self._buffers = HostBuffers()
        self._names: list[list[str]] = []  # the files of each rank

    def exist(self) -> bool:
        """Return whether there is a checkpoint to resume from; raise ValueError if ranks see different ones."""
        self._transport.check_agreement({"a last checkpoint": self._number or None})
        return self._number > 0

    def have_changed(self) -> bool:
        """Return whether another process has written a checkpoint since this object last read or wrote one."""
        return (self._latest() or 0) != self._seen

    def rewind(self) -> None:
        """Make the checkpoint that was read the last one: newer ones no longer count, and are replaced later."""
        if self._number != self._seen and self._transport.position.is_main:
            self._write_latest(self._number)
        self._seen = self._number

    def start(self, run: dict[str, Any], stages: dict[int, dict[str, Any]], microbatches: int = 0) -> None:
        """Copy the state and start to write a checkpoint; all ranks call it together.

        Args:
            run: The state of the whole run, which the main rank writes.
            stages: The states of the stages of this rank, by index.
            microbatches: The micro-batches so far, for messages.
        """
        position, number = self._transport.position, self._number + 1
        files = {
            _stage(index, position.replica): state if position.replica == 0 else {"flight": state["flight"]}
            for index, state in stages.items()
        }
        self._names = self._names or self._transport.gather(list(files))
        if position.is_main:
            files[RUN] = run
        copy = copy_to_host(files, self._buffers)

        def write() -> None:
            copy.wait()
            for state in copy.state.values():
                check_finite(_checked(state), microbatches)
            for name, state in copy.state.items():
                checkpoint.save(self.folder / _name(number) / name, state)

        self._writer.start(number, write, lambda: self._commit(number))

    def report(self) -> list[int]:
        """Return what this rank has written, as numbers for `RecentMaximum`."""
        return self._writer.report()

    def advance(self, found: Sequence[int]) -> bool:
        """Take note of what all ranks have written; return whether the checkpoint in progress is complete.

        Args:
            found: The largest of each number of `report`, in a recent tick.

        Raises:
            OSError: On all ranks, if a rank could not write its part.
            Diverged: On all ranks, if a weight is not finite.
        """
        return self._completed(self._writer.advance(found))

    def finish(self) -> bool:
        """Wait for the checkpoint in progress; return whether there was one. All ranks call it together.

        Raises:
            OSError: On all ranks, if a rank could not write its part.
            Diverged: On all ranks, if a weight is not finite.
        """
        return self._completed(self._writer.finish())

    def abandon(self) -> bool:
        """End the writing of this rank after an error; a process without others completes the checkpoint.

        Returns:
            True if a checkpoint has been completed.
        """
        return self._completed(self._writer.abandon())

    def save(self, run: dict[str, Any], stages: dict[int, dict[str, Any]]) -> None:
        """Write a checkpoint, and wait until it is complete; `start` describes the arguments.

        Raises:
            OSError: If a rank could not write its part.
            Diverged: If a weight is not finite.
        """
        self.start(run, stages)
        self.finish()

    def remove_older(self) -> None:
        """Remove checkpoints that are not kept; some are left if a run was killed while it removed them."""
        self._remove_but(self._number)

    def _completed(self, complete: bool) -> bool:
        if complete:
            self._number = self._seen = self._number + 1
        return complete

    def _commit(self, number: int) -> None:
        folder = self.folder / _name(number)
        for position, names in zip(self._transport.positions(), self._names, strict=True):
            if not all((folder / name).exists() for name in names):
                raise NotShared(
                    position, f"it is not in {folder} here: give all ranks the same folder, on a shared disk"
                )
        self._write_latest(number)
        self._remove_but(number)

    def _write_latest(self, number: int) -> None:
        checkpoint.write_json(self.folder / LATEST, {"format": FORMAT, "name": _name(number)})

    def _remove_but(self, number: int) -> None:
        """Remove what is older than the checkpoints to keep, and what is newer from before a resumption."""
        kept = self._complete(number)[-self._keep :]
        for path in _all(self.folder):
            old = int(path.name) <= number and int(path.name) not in kept
            if old or int(path.name) > number + 1:  # ranks may already be writing the next one
                remove_checkpoint(path)

    def _complete(self, last: int | None = None) -> list[int]:
        """Return the numbers of the checkpoints that are complete, up to the last one."""
        end = self._number if last is None else last
        return [int(path.name) for path in _all(self.folder) if int(path.name) <= end and (path / RUN).exists()]

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
            return checkpoint.load(self.folder / _name(self._number) / name, device)
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


def _name(number: int) -> str:
    return f"{number:06d}"


def _all(folder: Path) -> list[Path]:
    """The checkpoints in a folder, complete or not, the oldest first; other folders there are ignored."""
    return sorted(path for path in folder.glob("[0-9]" * len(_name(0))) if path.is_dir())


def _stage(index: int, replica: int) -> str:
    return f"stage{index}.pt" if replica == 0 else f"stage{index}.replica{replica}.pt"


def check_finite(tensors: Iterable[tuple[str, Any]], microbatches: int) -> None:
    """Raise Diverged if a tensor is not finite.

    Args:
        tensors: Weights and running statistics, with their names.
        microbatches: The micro-batches so far, for the message.

    Raises:
        Diverged: If a value is NaN or infinite.
    """
    for name, value in tensors:
        if isinstance(value, Tensor) and not value.is_meta and not torch.isfinite(value).all():
            raise Diverged(
                f"{name} is not finite after micro-batch {microbatches - 1}: lower the learning rate; the checkpoint "
                "before it is kept"
            )


def _checked(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of a stage that must be finite: its weights, and the running statistics of a replica."""
    yield from state.get("weights", {}).get("network", {}).items()
    for value in state.get("flight", {}).get("statistics", ()):
        yield "a running statistic", value


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
