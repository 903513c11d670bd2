"""Stopping between two ticks when somebody asks for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """An event that is set by the first SIGINT or SIGTERM; the next one acts as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    usual: dict[int, Any] = {}

    def note(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, usual[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        usual[number] = signal.signal(number, note)
    try:
        yield stop
    finally:
        for name, handler in usual.items():
            signal.signal(name, handler)
