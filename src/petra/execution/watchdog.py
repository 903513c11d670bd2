"""Watches over a job of many processes: whoever is dead or stuck is named, and the whole job ends.

Every process tells a store that all of them can read what it is at, a few times a second. A process that runs into
an error says so there; the first to speak is the one whose message is shown, and all others leave in silence.

Silence is counted in looks, not by the clock: a process that was itself not allowed to run for a while has looked less
often, and blames nobody for it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from petra.errors import first_line
from petra.execution.transport import Doing

INTERVAL = 0.5
"""Seconds between two looks."""
GONE = 3.0
"""Seconds of silence after which a process is taken for dead, once something has already gone wrong."""
DOUBT = 3 * GONE
"""Seconds that a process waits for such a silence, before it says no more than what it ran into itself."""


class Board(Protocol):
    """The part of a `torch.distributed.Store` that is used."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class Watchdog:
    """A thread that reports what this process is at and looks at the others."""

    def __init__(
        self,
        store: Board,
        process: int,
        names: list[str],
        doing: Doing,
        timeout: float,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._store, self._process, self._names, self._doing = store, process, names, doing
        self._timeout, self._leave = timeout, leave
        self._heard: dict[int, tuple[str, int]] = {}  # what each process said last, and in which look that was new
        self._own = (-1, 0)  # how often something new began here, and in which look that was new
        self._looks = 0
        self._closing = threading.Event()
        self._lock = threading.RLock()
        self._spoken = False
        self._thread = threading.Thread(target=self._watch, name="petra-watchdog", daemon=True)
        self._look()
        self._thread.start()

    def claim(self, message: str) -> bool:
        """Say what went wrong; False if something has been said before, by another process or by this one."""
        with self._lock:
            if self._spoken:
                return False
            try:
                said = self._store.compare_set("failure", "", json.dumps([self._process, message]))
                self._spoken = bool(json.loads(said)[0] == self._process)
            except RuntimeError:  # the store is gone, so those speak who are there in any job
                self._spoken = self._process <= 1
            return self._spoken

    def explain(self, error: Exception) -> str | None:
        """What is behind an error of the transport: who is gone, or None if another process has said it."""
        for _ in range(int(2 * DOUBT / INTERVAL)):
            time.sleep(INTERVAL / 2)
            try:
                if self._failure() is not None:
                    return None
            except RuntimeError:
                break
            silent = max(list(self._heard), key=self._silence, default=None)
            if silent is not None and self._silence(silent) > GONE:
                return self._gone(silent)
        return str(error)

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        self._thread.join(timeout=2 * GONE)  # it may just be talking to the store

    def _watch(self) -> None:
        while not self._closing.wait(INTERVAL):
            try:
                self._look()
                failure = self._failure()
            except Exception as error:  # whatever it is, a job that nobody watches over must not go on
                if not self._closing.wait(2 * GONE):
                    reason = first_line(error)
                    self._end(f"the store that all ranks report to is gone, and whoever holds it ({reason})")
                return
            if failure is not None and not self._closing.wait(2 * INTERVAL):
                # Said by another process. Whatever this one is blocked in will never come.
                self._leave(1)

    def _look(self) -> None:
        doing = self._doing
        self._looks += 1
        if doing.times != self._own[0]:
            self._own = doing.times, self._looks
        seconds = (self._looks - self._own[1]) * INTERVAL
        # Setting up may take long, with data to be read and decoded.
        if doing.set_up and not doing.waits and seconds > self._timeout:
            own = self._names[self._process]
            self._end(f"{own} is stuck in tick {doing.tick}, {doing.what}, for {seconds:.0f} s")
        keys = [f"doing/{process}" for process in range(len(self._names)) if process != self._process]
        said = json.dumps([self._looks, doing.tick, doing.what, doing.waiting_for])
        with self._lock:
            self._store.set(f"doing/{self._process}", said)
            there = [key for key in keys if self._store.check([key])]
            texts = [self._store.get(key).decode() for key in there]
        for key, text in zip(there, texts, strict=True):
            process = int(key.rsplit("/")[-1])
            if self._heard.get(process, ("", 0))[0] != text:
                self._heard[process] = text, self._looks
            elif self._silence(process) > self._timeout:
                self._end(self._gone(process))

    def _silence(self, process: int) -> float:
        """Seconds, or more if looks took long."""
        return (self._looks - self._heard[process][1]) * INTERVAL

    def _failure(self) -> list[Any] | None:
        with self._lock:
            if not self._store.check(["failure"]):
                return None
            said = json.loads(self._store.get("failure").decode() or "null")
        return None if said is None or said[0] == self._process else list(said)

    def _gone(self, process: int) -> str:
        _, *doing = json.loads(self._heard[process][0])
        own = self._doing
        return (
            f"{self._names[process]} is gone or stuck: last heard of in {_described(*doing)}; "
            f"{self._names[self._process]} is in {_described(own.tick, own.what, own.waiting_for)}"
        )

    def _end(self, message: str) -> None:
        with self._lock:  # which keeps the main thread from leaving before this is said
            if self._spoken:
                return  # the main thread has the word, and leaves when it has said it
            if self.claim(message):
                print(f"petra: error: {message}", file=sys.stderr, flush=True)
            self._leave(1)


def _described(tick: int, what: str, waiting_for: int | None) -> str:
    return f"tick {tick}, {what}" + (f", waiting for rank {waiting_for}" if waiting_for is not None else "")
