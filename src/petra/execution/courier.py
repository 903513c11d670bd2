"""A thread for what would keep a rank from computing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

Result = TypeVar("Result")
Errands = SimpleQueue[tuple["Future[Any]", Callable[[], Any]] | None]


class Courier:
    """Runs errands one after another, beside the thread that gives them to it.

    Unlike those of an executor, its thread holds up nobody who leaves, even while it waits for a rank that is gone.
    """

    def __init__(self, name: str) -> None:
        self._errands: Errands = SimpleQueue()
        self._given, self._ended = 0, [0]
        self._thread = Thread(target=_run, args=(self._errands, self._ended), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._errands.put, None).atexit = False

    @property
    def busy(self) -> bool:
        """Whether some errand has not come to its end."""
        return self._ended[0] < self._given

    def give(self, errand: Callable[[], Result]) -> Future[Result]:
        """What the errand will return, or raise."""
        future: Future[Result] = Future()
        self._given += 1
        self._errands.put((future, errand))
        return future

    def end(self, patience: float) -> None:
        """Have the thread end after what it was given, and wait for that so many seconds."""
        self._errands.put(None)
        self._thread.join(patience)


def at_once(errand: Callable[[], Result]) -> Future[Result]:
    """The same without a courier; what it raises is raised here."""
    future: Future[Result] = Future()
    future.set_result(errand())
    return future


def _run(errands: Errands, ended: list[int]) -> None:
    while (given := errands.get()) is not None:
        future, errand = given
        try:
            future.set_result(errand())
        except BaseException as error:
            future.set_exception(error)
        ended[0] += 1
        del given, future, errand  # and with them the tensors of a message: the next may be long in coming
