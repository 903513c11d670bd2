"""The current activity of a process, for the watchdog and for error messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Activity:
    """The current activity of a process; the watchdog reports it when the process is stuck."""

    tick: int = 0
    what: str = "setting up"
    waits: bool = False
    """True if the process waits for another one."""
    waiting_for: int | None = None
    """The rank that it waits for; None if it waits for all."""
    times: int = 0
    """The number of activities so far."""
    set_up: bool = False
    """True if set-up is over and the first action has begun."""

    def now(self, what: str, tick: int | None = None) -> None:
        """Begin a new activity.

        Args:
            what: A description.
            tick: The tick; None if it is the same.
        """
        self.what, self.waits, self.waiting_for, self.times = what, False, None, self.times + 1
        self.tick = self.tick if tick is None else tick

    @contextmanager
    def waiting(self, rank: int | None) -> Iterator[None]:
        """A context in which the process waits.

        Args:
            rank: The rank that it waits for; None for all.
        """
        self.waits, self.waiting_for = True, rank
        yield  # an error leaves it as it is
        self.waits, self.waiting_for, self.times = False, None, self.times + 1
