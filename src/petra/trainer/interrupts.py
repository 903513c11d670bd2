"""Stops a run between two ticks on SIGINT or SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(Exception):
    """The training was asked to stop by Ctrl-C or SIGTERM, and has written a checkpoint if it has a folder."""


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Set an event on the first SIGINT or SIGTERM; the next one has its usual effect.

    Yields:
        The event. Outside the main thread, where signals cannot be handled, it is never set.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    handlers: dict[int, Any] = {}

    def handle(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, handlers[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        for handled, handler in handlers.items():
            signal.signal(handled, handler)
