"""A connection to the store of a job that is made again when it is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from petra.distributed.membership import Store

Answer = TypeVar("Answer")

RECONNECT_LIMIT = timedelta(seconds=2)
"""The time to connect again; the store is on this machine."""


class StoreConnection:
    """A connection to the store of a job; it connects again if the connection is lost.

    Args:
        connect: Connects to the store within a time limit.
        limit: The time limit of the first connection.
    """

    def __init__(self, connect: Callable[[timedelta], Store], limit: timedelta) -> None:
        self._connect, self._store = connect, connect(limit)
        self._lock = threading.Lock()
        self._gone = False
        """The store did not answer a new connection, and never will."""

    def set(self, key: str, value: str, /) -> None:
        """Write an entry."""
        self._call(lambda store: store.set(key, value))

    def get(self, key: str, /) -> bytes:
        """Read an entry."""
        return self._call(lambda store: store.get(key))

    def check(self, keys: list[str], /) -> bool:
        """Return whether all entries exist."""
        return self._call(lambda store: store.check(keys))

    def _call(self, ask: Callable[[Store], Answer]) -> Answer:
        store = self._store
        try:
            return ask(store)
        except RuntimeError:
            with self._lock:
                if self._gone:
                    raise
                if self._store is store:  # no other thread has connected again
                    self._gone = True
                    self._store = self._connect(RECONNECT_LIMIT)
                    self._gone = False
            return ask(self._store)
