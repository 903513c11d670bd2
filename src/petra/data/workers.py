"""Runs a function in worker processes, in order; underneath are those of `torch.utils.data.DataLoader`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

Task = TypeVar("Task")
Result = TypeVar("Result")
_TASKS_PER_WORKER = 2


class _Failure:
    """A `ValueError` of a worker. The loader would put the traceback of the worker into the message."""

    def __init__(self, error: ValueError) -> None:
        self.message = str(error)


class _Tasks(Generic[Task]):
    """The sampler of the loader, with other tasks for every epoch."""

    def __init__(self) -> None:
        self.tasks: Iterable[Task] = ()

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)


class _Work(Dataset[Any], Generic[Task, Result]):
    def __init__(self, function: Callable[[Task], Result]) -> None:
        self._function = function

    def __getitem__(self, task: Task) -> Result | _Failure:
        try:
            return self._function(task)
        except ValueError as error:
            return _Failure(error)


class Workers(Generic[Task, Result]):
    """Applies a function to tasks in worker processes.

    The processes start at the first task and are kept until `close`. They have no threads of their own and use no GPU.

    Args:
        function: The function. With the start methods `spawn` and `forkserver`, it must be picklable.
        count: Number of processes; 0 to call the function in this process.
        pin_memory: Copy tensors of the results to pinned memory, from which they can be copied to a GPU
            asynchronously.
        timeout: Seconds after which a result is an error; 0 for no limit.
        context: Start method of the processes, such as `"spawn"`; None for the default of Python.

    """

    def __init__(
        self,
        function: Callable[[Task], Result],
        count: int,
        *,
        pin_memory: bool = False,
        timeout: float = 0,
        context: str | None = None,
    ) -> None:
        check_workers(count)
        self._function, self._count, self._pin_memory = function, count, pin_memory
        self._timeout, self._context = timeout, context
        self._tasks: _Tasks[Task] = _Tasks()
        self._loader: DataLoader[Any] | None = None
        self._runs = 0

    def run(self, tasks: Iterable[Task]) -> Iterator[Result]:
        """Apply the function to tasks.

        Tasks are taken a few at a time, before their results are needed.

        Args:
            tasks: The tasks.

        Returns:
            An iterator over the results, in the order of the tasks. With worker processes, it ends any iterator of an
            earlier call.

        Raises:
            ValueError: If the function raised it.

        """
        self._runs += 1
        return map(self._function, tasks) if self._count == 0 else self._run(tasks, self._runs)

    def close(self) -> None:
        """End the processes; another call of `run` starts them again."""
        self._runs += 1
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            # Without this, the garbage collector may close the queues first; the processes then end after 5 s only.
            iterator._shutdown_workers()
        self._loader = None

    def _run(self, tasks: Iterable[Task], run: int) -> Iterator[Result]:
        self._check_current(run)
        self._tasks.tasks = tasks
        with warnings.catch_warnings():
            # More workers than cores, and a fork while there are threads: both can be intended.
            warnings.simplefilter("ignore")
            if self._loader is None:
                self._loader = self._start()
            results = iter(self._loader)
        while True:
            self._check_current(run)
            try:
                result = next(results)
            except StopIteration:
                return
            if isinstance(result, _Failure):
                raise ValueError(result.message)
            yield result

    def _check_current(self, run: int) -> None:
        if run != self._runs:
            raise ValueError("another epoch of these batches has begun, and worker processes serve one at a time")

    def _start(self) -> DataLoader[Any]:
        return DataLoader(
            _Work(self._function),
            sampler=self._tasks,
            batch_size=None,
            num_workers=self._count,
            collate_fn=_unchanged,
            pin_memory=self._pin_memory,
            timeout=self._timeout,
            multiprocessing_context=self._context,
            generator=torch.Generator(),  # the loader draws from it, and not from the default one
            prefetch_factor=_TASKS_PER_WORKER,
            persistent_workers=True,
        )


def _unchanged(result: Any) -> Any:
    return result


def describe_lost_worker(error: BaseException) -> str | None:
    """Return what to do about an error that says that a worker was killed; None for other errors.

    The loader raises it from a signal handler, so it may come from any line of the training.

    Args:
        error: The error.

    Returns:
        One line.

    """
    text = str(error).rstrip(". ")
    if not isinstance(error, RuntimeError) or not text.startswith("DataLoader worker (pid"):
        return None
    return (
        f"a worker process that reads data has died ({text}): continue with --resume; if memory was short, "
        "lower --workers"
    )


def check_workers(count: int) -> None:
    """Raise ValueError if there cannot be so many workers."""
    if count < 0:
        raise ValueError(f"workers is {count}: give 0 or more")


def default_workers(processes: int = 1) -> int:
    """Return a number of workers for each of several processes: together one for each core, but at most 16 each.

    Args:
        processes: Processes of the training on this machine.

    Returns:
        The number.

    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, cores // processes))
