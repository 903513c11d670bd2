"""A thread for communication that would otherwise keep a rank from computing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

Result = TypeVar("Result")
Tasks = SimpleQueue[tuple["Future[Any]", Callable[[], Any]] | None]


class IOThread:
    """Runs tasks one after another, concurrently with the thread that submits them.

    Unlike the threads of `concurrent.futures`, it never delays the exit of the process, even while it waits for a rank
    that no longer exists.

    Args:
        name: The name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._tasks: Tasks = SimpleQueue()
        self._submitted, self._finished = 0, [0]
        self._thread = Thread(target=_run, args=(self._tasks, self._finished), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None).atexit = False

    @property
    def busy(self) -> bool:
        """True if some task has not finished yet."""
        return self._finished[0] < self._submitted

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Queue a task.

        Args:
            task: The function to call on the thread.

        Returns:
            A future with the result of the task, or with the error that it raises.
        """
        future: Future[Result] = Future()
        self._submitted += 1
        self._tasks.put((future, task))
        return future

    def close(self, timeout: float) -> None:
        """Let the thread end after the tasks that are queued, and wait for it.

        Args:
            timeout: The most seconds to wait.
        """
        self._tasks.put(None)
        self._thread.join(timeout)


def run_immediately(task: Callable[[], Result]) -> Future[Result]:
    """Run a task in the calling thread and return a completed future. Errors of the task are raised here."""
    future: Future[Result] = Future()
    future.set_result(task())
    return future


def _run(tasks: Tasks, finished: list[int]) -> None:
    while (item := tasks.get()) is not None:
        future, task = item
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)
        finished[0] += 1
        # Release the tensors of this message now: the next task may not arrive for a long time.
        del item, future, task
