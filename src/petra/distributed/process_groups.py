"""The process groups of one process, and how waiting for them is interrupted."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from petra.distributed.io_thread import IOThread, Task, close_threads
from petra.distributed.transport import RankPosition
from petra.formatting import first_line
from petra.pipeline import Activity

UNUSED_TAG = 2**30
"""A tag that no message has."""
INTERRUPT_INTERVAL = 0.05
"""Seconds between two checks for an interruption while the rank waits."""
DESTROY_INTERVAL = 1.0
"""Seconds between two attempts to destroy groups that are left behind."""
THREADS_LIMIT, INTERRUPTED_LIMIT = 2.0, 0.1
"""Seconds that I/O threads have to end, at the end of a job and after an interruption."""

Result = TypeVar("Result")


class LostRank(RuntimeError):
    """A message could not be sent or received, because the rank at the other end is gone or stuck."""


class ProcessGroups:
    """The process groups of one process.

    If a connection is closed in the middle of a message, gloo keeps waiting until its timeout. Therefore, threads wait
    for gloo, and the rank waits for the threads. After an interruption, the rank no longer waits, and threads that are
    stuck are left behind.

    Args:
        mesh: The processes by rank and replica.
        position: The position of this process.
        activity: What this process is doing, for error messages.
        timeout: How long to wait for a message.
    """

    def __init__(self, mesh: DeviceMesh, position: RankPosition, activity: Activity, timeout: timedelta) -> None:
        self.position, self.activity = position, activity
        self._timeout = timeout
        self.interrupted = False
        self.connecting = False
        """True while this process connects to others. This cannot be interrupted."""
        self.replicas = mesh.get_group("data")
        """The replicas of this rank."""
        everyone = dist.group.WORLD
        assert everyone is not None
        self._opened = [everyone, mesh.get_group("pipeline"), self.replicas]
        self.pairs: dict[tuple[int, int], dist.ProcessGroup] = {}
        """The groups of two ranks that exchange messages, by the one that sends and the one that receives."""
        self._threads: dict[str, IOThread] = {}

    def open(self, processes: list[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
        """Open a group. All processes call it.

        Args:
            processes: The processes; None for all.
            backend: The backend; None for the default.

        Returns:
            The group.

        Raises:
            LostRank: If another generation of the job has begun.
        """
        if self.interrupted:
            raise self._interruption()
        self.connecting = True
        try:
            group: dist.ProcessGroup = dist.new_group(processes, timeout=self._timeout, backend=backend)
        finally:
            self.connecting = False
        if isinstance(group, dist.ProcessGroup):  # this process is in it
            self._opened.append(group)
            if self.interrupted:  # meanwhile
                close_group(group)
        return group

    def connect(self, pairs: Sequence[tuple[int, int]], device: torch.device) -> None:
        """Open groups of two ranks, in each replica. All processes call it.

        Args:
            pairs: The sending and the receiving rank of each.
            device: The device of the messages of the backend.
        """
        replicas = self.position.replicas
        for source, to in sorted(set(pairs) - set(self.pairs)):
            for replica in range(replicas):  # every process makes every group, in the same order
                sender, receiver = source * replicas + replica, to * replicas + replica
                group = self.open(sorted((sender, receiver)))
                if replica == self.position.replica:
                    self.pairs[source, to] = group
                # Send one number now. NCCL opens a channel with its first message, and two ranks that open different
                # channels first would wait for each other.
                number = torch.zeros(1, device=device)
                if sender == dist.get_rank():
                    dist.send(number, receiver, group=group)
                elif receiver == dist.get_rank():
                    dist.recv(number, sender, group=group)

    def interrupt(self) -> None:
        """Make all communication fail from now on, also where this process waits for it."""
        self.interrupted = True
        for group in self._opened:
            close_group(group)

    def leave_behind(self) -> None:
        """Let a thread destroy the groups when nothing else refers to them.

        The destructor of a group waits until its operations have ended, which may take as long as their timeout.
        """
        groups, self._opened = self._opened, []
        self.pairs.clear()
        threading.Thread(target=_destroy, args=(groups,), name="petra-old-groups", daemon=True).start()

    def wait_for(self, task: Task[Result]) -> Result:
        """Wait for a task that communicates, until it has finished or the groups are interrupted.

        Args:
            task: The task of a thread.

        Returns:
            Its result.

        Raises:
            LostRank: If the groups are interrupted before the task has finished.
        """
        while not task.wait(INTERRUPT_INTERVAL):
            if self.interrupted:
                raise self._interruption()
        return task.result()

    def on_thread(self, communicate: Callable[[], Result], name: str = "with others") -> Result:
        """Call a function that waits for gloo in a thread, and wait for its result.

        Args:
            communicate: The function.
            name: The name of the thread.

        Returns:
            The result of the function.
        """
        inference = torch.is_inference_mode_enabled()  # which belongs to a thread

        def work() -> Result:
            with torch.inference_mode(inference):
                return communicate()

        return self.wait_for(self.thread(name).submit(work))

    def thread(self, name: str) -> IOThread:
        """Return the thread of a name; it is started when it is first needed."""
        if name not in self._threads:
            self._threads[name] = IOThread(f"petra-{name.replace(' ', '-')}")
        return self._threads[name]

    def busy(self, name: str) -> bool:
        """Return whether a thread works or waits."""
        return name in self._threads and self._threads[name].busy

    def close_threads(self, *names: str) -> None:
        """End threads, in the order in which they were started. Those that are stuck are left behind.

        Args:
            *names: The names of the threads; all by default.
        """
        found = [self._threads.pop(name) for name in names or [*self._threads] if name in self._threads]
        close_threads(found, INTERRUPTED_LIMIT if self.interrupted else THREADS_LIMIT)

    def post_send(self, to: int, pieces: list[Tensor]) -> Callable[[], None]:
        """Start sending a message, and return a function that waits until it has left."""
        try:
            group = self.pairs[self.position.rank, to]
            works = [group.send([piece], int(to > self.position.rank), 0) for piece in pieces]
        except RuntimeError as error:
            raise self._lost(to, "send to", error) from error

        def wait(kept: list[Tensor] = pieces) -> None:  # they must stay alive until then
            with self.named(to, "send to"):
                for work in works:
                    work.wait()

        return wait

    def post_receive(self, source: int, pieces: list[Tensor]) -> Callable[[], None]:
        """Post the receive of a message, and return a function that waits until it has arrived."""
        try:
            group = self.pairs[source, self.position.rank]
            works = [group.recv([piece], int(source > self.position.rank), 0) for piece in pieces]
        except RuntimeError as error:
            raise self._lost(source, "receive from", error) from error

        def wait() -> None:
            with self.named(source, "receive from"):
                for work in works:
                    work.wait()

        return wait

    @contextmanager
    def named(self, other: int | None, verb: str) -> Iterator[None]:
        """Name the other rank in errors of communication.

        Args:
            other: The other rank; None for several.
            verb: What this process does with it.

        Raises:
            LostRank: Instead of other errors of communication.
        """
        try:
            yield
        except LostRank:
            raise
        except RuntimeError as error:
            raise self._lost(other, verb, error) from error

    def _lost(self, other: int | None, verb: str, error: RuntimeError) -> LostRank:
        """Return an error that says which rank is gone; torch.distributed raises no subclass for lost connections."""
        peer = "the other ranks" if other is None else f"rank {other}"
        where = f"{self.position}, tick {self.activity.tick}, {self.activity.what}"
        return LostRank(f"{where}: cannot {verb} {peer} ({first_line(error)})")

    def _interruption(self) -> LostRank:
        return LostRank(f"{self.position}: another generation of the job has begun")


def close_group(group: dist.ProcessGroup) -> None:
    """Close the connections of a process group, also where a thread waits for one of them."""
    if "nccl" in group.name():
        group.abort()
    for other in range(group.size()):
        if other == group.rank():
            continue
        try:
            # Gloo closes all connections of a group when one receive times out.
            group.recv([torch.empty(1)], other, UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return
            # The connection to this process is closed already.


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        time.sleep(DESTROY_INTERVAL)
        for index in reversed(range(len(groups))):
            if sys.getrefcount(groups[index]) <= 2:  # the list and the argument
                del groups[index]
