"""The current activity of a process, for the watchdog and for error messages."""

from __future__ import annotations

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

    def waiting(self, rank: int | None) -> Waiting:
        """A context in which the process waits.

        Args:
            rank: The rank that it waits for; None for all.

        Returns:
            The context.
        """
        return Waiting(self, rank)


class Waiting:
    """A context in which a process waits; a class, because ranks wait many times in a tick.

    Args:
        activity: The activity of the process.
        rank: The rank that it waits for; None for all.
    """

    __slots__ = ("_activity", "_rank")

    def __init__(self, activity: Activity, rank: int | None) -> None:
        self._activity, self._rank = activity, rank

    def __enter__(self) -> None:
        self._activity.waits, self._activity.waiting_for = True, self._rank

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # an error leaves it as it is
            activity = self._activity
            activity.waits, activity.waiting_for, activity.times = False, None, activity.times + 1
