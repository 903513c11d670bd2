"""Which processes a job has. The list changes when a lost process is replaced, or when the others take over its stages.

The launcher writes the lists, the processes read them. Each list is a *generation*: within one, the processes and their
ranks stay the same.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

MEMBER = "PETRA_MEMBER"
"""The environment variable with the number of a process, which is never used for another one."""
REPLACEMENT = "PETRA_REPLACEMENT"
"""The environment variable that marks a process as one that replaces a lost one."""
GENERATION, PROGRESS, DONE = "petra/generation", "petra/progress", "petra/done"
POLL = 0.01
"""Seconds between two polls of the store while a process waits for a new generation."""
START_LIMIT = 120.0
"""Seconds that a new process has to start, import PyTorch and load the data."""


class Store(Protocol):
    """The methods of a `torch.distributed.Store` that a membership uses."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class JobEnded(Exception):
    """The launcher has ended the job and reported the reason."""


@dataclass(frozen=True)
class Roster:
    """The processes of a job in one generation; none if the job has ended."""

    generation: int
    members: tuple[int, ...]
    """The numbers of the processes, in the order of their ranks."""

    def to_json(self) -> str:
        """Return the entry in the store."""
        return json.dumps([self.generation, self.members])

    @classmethod
    def parse(cls, text: str) -> Roster:
        """Read an entry of the store."""
        generation, members = json.loads(text)
        return cls(generation, tuple(members))


class Membership:
    """This process in a job whose lost processes are replaced.

    Args:
        store: A connection to the store of the job that nothing else uses.
        number: The number of this process.
    """

    def __init__(self, store: Store, number: int) -> None:
        self._store, self.number = store, number

    @property
    def generation(self) -> int:
        """The current generation; -1 before the first one."""
        return int(self._store.get(GENERATION)) if self._store.check([GENERATION]) else -1

    def wait(self, after: Roster | None, timeout: float) -> Roster:
        """Wait for a generation that includes this process, and until all of its processes are ready to connect.

        A process that does not get ready is reported as lost.

        Args:
            after: The last generation that this process was in; None for none.
            timeout: The seconds that a process has to get ready which has been ready before.

        Returns:
            The processes.

        Raises:
            JobEnded: If the job does not go on.
        """
        while True:
            roster = self._wait_for_roster(-1 if after is None else after.generation)
            self._store.set(_ready(roster.generation, self.number), "")
            self._store.set(_started(self.number), "")
            keys = [_ready(roster.generation, other) for other in roster.members]
            began = time.monotonic()
            while self.generation == roster.generation:
                if self._store.check(keys):
                    return roster
                self._check_not_done()
                self._report_late(roster, time.monotonic() - began, timeout)
                time.sleep(POLL)

    def _report_late(self, roster: Roster, seconds: float, timeout: float) -> None:
        """Report the first process that is not ready in time."""
        if seconds < min(timeout, START_LIMIT):
            return
        for position, member in enumerate(roster.members):
            # In this order: a process that gets ready between the two has been found not to have started.
            limit = timeout if self._store.check([_started(member)]) else START_LIMIT
            if seconds > limit and not self._store.check([_ready(roster.generation, member)]):
                self.report_lost(roster, position, f"process {member} has not been ready for {seconds:.0f} s")
                return

    def _check_not_done(self) -> None:
        if self._store.check([DONE]):
            raise JobEnded

    def _wait_for_roster(self, after: int) -> Roster:
        while True:
            self._check_not_done()
            if self.generation > after:
                roster = Roster.parse(self._store.get(_roster(self.generation)).decode())
                if not roster.members:
                    raise JobEnded
                if self.number in roster.members:
                    return roster
            time.sleep(POLL)

    def wait_for_change(self, generation: int, seconds: float) -> bool:
        """Wait until the generation is over.

        Args:
            generation: The generation.
            seconds: The time limit.

        Returns:
            Whether it is over.
        """
        deadline = time.monotonic() + seconds
        while self.generation == generation:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL)
        return True

    def report_lost(self, roster: Roster, process: int, reason: str) -> None:
        """Ask the launcher to replace a process that hangs.

        Args:
            roster: The processes of this generation.
            process: The position of the process in the roster.
            reason: Why it is taken for lost.
        """
        self._store.set(lost_key(roster.generation), json.dumps([roster.members[process], reason]))
        self._call_launcher(roster)

    def report_suspects(self, roster: Roster, processes: Sequence[int]) -> None:
        """Name processes that may have to be replaced soon. It is repeated for as long as they are suspected.

        Args:
            roster: The processes of this generation.
            processes: The positions of the processes in the roster.
        """
        self._store.set(suspects_key(roster.generation), json.dumps([roster.members[one] for one in processes]))
        self._call_launcher(roster)

    def ask_for_another(self, roster: Roster) -> None:
        """Ask the launcher for another generation of the same processes, because a connection or a message was lost.

        Args:
            roster: The processes of this generation.
        """
        self._store.set(renewal_key(roster.generation), "")
        self._call_launcher(roster)

    def _call_launcher(self, roster: Roster) -> None:
        """Make the launcher read what was reported; it polls one key only."""
        self._store.set(call_key(roster.generation), "")

    def report_done(self) -> None:
        """Tell the launcher that the work is done: who ends now is not lost."""
        self._store.set(DONE, "")

    def replace_this_process(self, reason: str) -> None:
        """End this process at once; the launcher replaces it.

        Args:
            reason: The reason, which is printed.
        """
        said = partial(print, f"petra: {reason}", file=sys.stderr, flush=True)
        printing = threading.Thread(target=said, daemon=True)
        printing.start()
        printing.join(1.0)  # nobody may read it
        os.kill(os.getpid(), signal.SIGKILL)

    def report_progress(self, value: int) -> None:
        """Tell the launcher how far the job has come.

        Args:
            value: Another number than the last one.
        """
        self._store.set(PROGRESS, str(value))


def publish(store: Store, roster: Roster) -> None:
    """Begin a generation; the launcher calls it."""
    store.set(_roster(roster.generation), roster.to_json())
    store.set(GENERATION, str(roster.generation))


def member_number() -> int | None:
    """Return the number of this process; None in a job whose processes are not replaced."""
    text = os.environ.get(MEMBER, "")
    return int(text) if text.isdecimal() else None


def is_replacement() -> bool:
    """Return whether this process was started to replace a lost one, now or later."""
    return member_number() is not None and REPLACEMENT in os.environ


def call_key(generation: int) -> str:
    """Return the key that is there if something was reported to the launcher."""
    return f"petra/call/{generation}"


def lost_key(generation: int) -> str:
    """Return the key of the report about a process that hangs."""
    return f"petra/lost/{generation}"


def suspects_key(generation: int) -> str:
    """Return the key of the processes that may have to be replaced soon."""
    return f"petra/suspects/{generation}"


def renewal_key(generation: int) -> str:
    """Return the key of the request for another generation of the same processes."""
    return f"petra/renewal/{generation}"


def _roster(generation: int) -> str:
    return f"petra/roster/{generation}"


def _ready(generation: int, member: int) -> str:
    return f"petra/ready/{generation}/{member}"


def _started(member: int) -> str:
    return f"petra/started/{member}"
