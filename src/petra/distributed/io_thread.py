"""A thread for communication that would otherwise keep a rank from computing."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Task(Generic[Result]):
    """A function that a thread calls, and its result.

    A `concurrent.futures.Future` does the same and takes ten times as long to create.

    Args:
        work: The function; None if `begin_with` gives it later.
    """

    __slots__ = ("_done", "_error", "_finished", "_result", "_work")

    def __init__(self, work: Callable[[], Result] | None = None) -> None:
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = False
        self._finished = Lock()  # held until it is, and for a moment by those who ask
        self._finished.acquire()

    def begin_with(self, work: Callable[[], Result]) -> None:
        """Set the function."""
        self._work = work

    def run(self) -> None:
        """Call the function."""
        assert self._work is not None
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self._finish()

    def fail(self, error: BaseException) -> None:
        """Finish with an error instead of calling the function."""
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._work, self._done = None, True  # the tensors of the function are released
        self._finished.release()

    def done(self) -> bool:
        """Return whether it has finished."""
        return self._done

    def exception(self) -> BaseException | None:
        """Wait until it has finished; return its error, or None."""
        with self._finished:
            return self._error

    def wait(self, timeout: float) -> bool:
        """Wait until it has finished.

        Args:
            timeout: The most seconds to wait.

        Returns:
            Whether it has finished.
        """
        if not self._finished.acquire(timeout=timeout):
            return False
        self._finished.release()  # others may ask, too
        return True

    def result(self, timeout: float | None = None) -> Result:
        """Wait until it has finished.

        Args:
            timeout: The most seconds to wait; None waits for ever.

        Returns:
            What the function returned.

        Raises:
            BaseException: The error of the function.
            TimeoutError: If it has not finished in time.
        """
        if not self.wait(-1 if timeout is None else timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        result: Result = self._result
        return result


class IOThread:
    """Runs tasks one after another, concurrently with the thread that submits them.

    Unlike the threads of `concurrent.futures`, it never delays the exit of the process, even while it waits for a rank
    that no longer exists.

    Args:
        name: The name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._submitted, self._finished = 0, [0]
        self._thread = Thread(target=_run, args=(self._tasks, self._finished), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None).atexit = False

    @property
    def busy(self) -> bool:
        """True if some task has not finished yet."""
        return self._finished[0] < self._submitted

    def submit(self, work: Callable[[], Result]) -> Task[Result]:
        """Queue a task.

        Args:
            work: The function to call on the thread.

        Returns:
            The task, with the result of the function or the error that it raises.
        """
        task = Task(work)
        self.queue(task)
        return task

    def queue(self, task: Task[Any]) -> None:
        """Queue a task that has been created before. Only one thread may queue tasks.

        Args:
            task: The task.
        """
        self._submitted += 1
        self._tasks.put(task)

    def close(self, timeout: float) -> None:
        """Let the thread end after the tasks that are queued, and wait for it.

        Args:
            timeout: The most seconds to wait.
        """
        self._tasks.put(None)
        self._thread.join(timeout)


def close_threads(threads: Iterable[IOThread], timeout: float) -> None:
    """Let threads end, one after another.

    Args:
        threads: The threads.
        timeout: The most seconds to wait for all of them together.
    """
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.close(max(0.0, deadline - time.monotonic()))


def _run(tasks: SimpleQueue[Task[Any] | None], finished: list[int]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        finished[0] += 1
        del task  # its result is released now: the next task may not arrive for a long time
