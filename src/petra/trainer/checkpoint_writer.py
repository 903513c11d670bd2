"""Writes a checkpoint in a thread of each rank while training goes on, and lets all ranks notice how it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from petra.distributed import RankPosition, Transport
from petra.distributed.io_thread import IOThread, Task
from petra.pipeline import Diverged


class NotShared(OSError):
    """The main rank does not find the files of another rank.

    Args:
        position: The rank.
        text: What to do.
    """

    def __init__(self, position: RankPosition, text: str) -> None:
        super().__init__(text)
        self.position = position


class CheckpointWriter:
    """Writes one checkpoint at a time, in two phases.

    First every rank writes its files. When all have, the main rank commits the checkpoint. Both happen in a thread. The
    ranks tell each other by three numbers in every tick, so none of them waits. All ranks start, notice and finish a
    checkpoint in the same tick.

    Args:
        transport: Connects the ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._thread: IOThread | None = None
        self._number = 0
        self._written: Task[None] | None = None
        self._committed: Task[None] | None = None
        self._commit: Callable[[], None] = lambda: None

    @property
    def busy(self) -> bool:
        """True if a checkpoint is in progress."""
        return self._written is not None

    def start(self, number: int, write: Callable[[], None], commit: Callable[[], None]) -> None:
        """Start a checkpoint.

        Args:
            number: The number of the checkpoint, larger than those before.
            write: Writes the files of this rank.
            commit: Makes the checkpoint valid; the main rank calls it when all ranks have written.
        """
        assert not self.busy
        self._number, self._commit = number, commit
        self._written = self._submit(write)

    def report(self) -> list[int]:
        """Return the numbers of this rank for `RecentMaximum`: minus the last checkpoint written, failed, committed."""
        tasks = [task for task in (self._written, self._committed) if task is not None and task.done()]
        failed = any(task.exception() is not None for task in tasks)
        written = self._number if tasks and not failed else self._number - 1
        committed = self._number if len(tasks) == 2 and not failed else 0
        return [-written, self._number if failed else 0, committed]

    def advance(self, found: Sequence[int]) -> bool:
        """Take note of the largest numbers of all ranks.

        Args:
            found: The largest of each number of `report` in a recent tick, the same on all ranks.

        Returns:
            True if the checkpoint is complete.

        Raises:
            OSError: On all ranks, if one of them could not write its files.
            Diverged: On all ranks, if a weight is not finite.
        """
        if not self.busy:
            return False
        written, failed, committed = -found[0], found[1], found[2]
        if failed == self._number:
            return self.finish()
        if committed == self._number:
            self._written = self._committed = None
            return True
        if written == self._number:
            self._start_commit()
        return False

    def finish(self) -> bool:
        """Wait until the checkpoint is complete. All ranks call this together.

        Returns:
            True if one was in progress.

        Raises:
            OSError: On all ranks, if one of them could not write its files.
            Diverged: On all ranks, if a weight is not finite.
        """
        if not self.busy:
            return False
        try:
            self._transport.activity.now("writing a checkpoint")
            self._wait_for(self._written)
            self._start_commit()
            self._wait_for(self._committed)
        finally:
            self._written = self._committed = None
        return True

    def abandon(self) -> bool:
        """Wait until this rank writes no more, after an error; other ranks may be gone.

        A process without others completes the checkpoint.

        Returns:
            True if a checkpoint is complete now.
        """
        try:
            if len(self._transport.positions()) == 1:
                return self.finish()
            for task in (self._written, self._committed):
                if task is not None:
                    task.exception()
        except (OSError, Diverged):
            pass  # an earlier error is being reported
        finally:
            self._written = self._committed = None
        return False

    def _submit(self, task: Callable[[], None]) -> Task[None]:
        if self._thread is None:
            self._thread = IOThread("petra-checkpoint")
        return self._thread.submit(task)

    def _start_commit(self) -> None:
        if self._transport.position.is_main and self._committed is None:
            self._committed = self._submit(self._commit)

    def _wait_for(self, task: Task[None] | None) -> None:
        """Wait for this task on all ranks; raise the first error on all of them."""
        own: Exception | None = None
        try:
            if task is not None:
                task.result()
        except Exception as error:
            own = error
        reports = self._transport.gather(None if own is None else _describe(own))
        for position, report in zip(self._transport.positions(), reports, strict=True):
            if report is None:
                continue
            kind, text, process = report
            if kind == "diverged":
                raise Diverged(text)
            if kind == "disk":
                positions = self._transport.positions()
                who = f"{position if process is None else positions[process]}: " if len(reports) > 1 else ""
                kept = "; the one before it is kept" if self._number > 1 else ""
                raise OSError(f"{who}the checkpoint could not be written ({text}){kept}")
            raise own if own is not None else RuntimeError(f"{position}: {text}")


def _describe(error: Exception) -> tuple[str, str, int | None]:
    if isinstance(error, Diverged):
        return "diverged", str(error), None
    if isinstance(error, NotShared):
        return "disk", str(error), error.position.rank * error.position.replicas + error.position.replica
    if isinstance(error, OSError):
        return "disk", error.strerror or str(error), None
    return "error", str(error), None
