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
        Thread(target=_run, args=(self._errands,), name=name, daemon=True).start()
        weakref.finalize(self, self._errands.put, None).atexit = False

    def give(self, errand: Callable[[], Result]) -> Future[Result]:
        """What the errand will return, or raise."""
        future: Future[Result] = Future()
        self._errands.put((future, errand))
        return future


def _run(errands: Errands) -> None:
    while (given := errands.get()) is not None:
        future, errand = given
        try:
            future.set_result(errand())
        except BaseException as error:
            future.set_exception(error)
        del given, future, errand  # and with them the tensors of a message: the next may be long in coming
