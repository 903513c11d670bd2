"""Watches the processes of a job: names a process that has died or hangs, and ends the whole job.

A few times a second, every process writes to a shared store what it is doing. A process that fails writes a failure
report there. The first report is the one that is printed; all other processes exit without a message.

Silence is measured in polls, not in wall time. A process that was suspended has polled less often as well, so it does
not blame the others.

In a job whose lost processes are replaced, the watchdog does not end the job. It asks the launcher to replace the
process, and interrupts the communication of this one when the launcher begins a new generation. Well before the
timeout, it names the process to the launcher, which starts another one in advance.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from petra.distributed.membership import Membership, Roster
from petra.formatting import first_line
from petra.pipeline.activity import Activity

INTERVAL = 0.5
"""Seconds between two polls."""
SHORTEST_INTERVAL = 0.1
"""Seconds between two polls if the timeout is short and lost processes are replaced."""
POLLS_PER_TIMEOUT = 20
"""The polls within a short timeout."""
SUSPICION = 0.25
"""The share of the timeout after which another process is started, so that it is ready when the timeout is over."""
SILENCE_LIMIT = 3.0
"""Seconds of silence after which a process counts as dead, once something has gone wrong."""
STORE_LIMIT = 30.0
"""Seconds without an answer of the store after which it counts as lost, if the timeout is not longer."""
CONNECT_PATIENCE = 3.0
"""Seconds that a process may keep connecting after its generation is over, before it is replaced."""
GENERATION_INTERVAL = 0.1
"""Seconds between two polls for a new generation."""
DIAGNOSIS_TIMEOUT = 3 * SILENCE_LIMIT
"""Seconds that a process looks for the cause of a lost connection, before it reports only the connection."""


class KeyValueStore(Protocol):
    """The methods of a `torch.distributed.Store` that the watchdog uses."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(frozen=True)
class Generation:
    """The generation of a job whose lost processes are replaced."""

    membership: Membership
    """This process in the job."""
    roster: Roster
    """The processes of this generation."""
    interrupt: Callable[[], None]
    """Makes the communication of this process fail, so that it joins the next generation."""
    connecting: Callable[[], bool]
    """Returns whether this process is connecting to others, which `interrupt` does not end."""


class Watchdog:
    """A thread that publishes what this process is doing, and monitors the others.

    Args:
        store: The store that all processes share.
        process: The number of this process.
        names: The names of all processes, for messages.
        activity: What this process is doing.
        timeout: The seconds after which a process that makes no progress counts as stuck.
        exit: Ends this process with an exit code.
        generation: The generation of the job, if lost processes are replaced.
    """

    def __init__(
        self,
        store: KeyValueStore,
        process: int,
        names: list[str],
        activity: Activity,
        timeout: float,
        exit: Callable[[int], None] = os._exit,
        generation: Generation | None = None,
    ) -> None:
        self._store, self._process, self._names, self._activity = store, process, names, activity
        self._timeout, self._exit, self._generation = timeout, exit, generation
        shortest = INTERVAL if generation is None else SHORTEST_INTERVAL
        self._interval = min(INTERVAL, max(shortest, timeout / POLLS_PER_TIMEOUT))
        self._last_seen: dict[int, tuple[str, int]] = {}  # process -> its last status, and the poll that found it
        self._last_progress = (-1, 0)  # the activity counter of this process, and the poll in which it changed
        self._last_change: dict[int, tuple[list[Any], int]] = {}  # process -> its last activity, and the poll of it
        self._polls = 0
        self._closing = threading.Event()
        self._lock = threading.RLock()
        self._reported = False
        self._thread = threading.Thread(target=self._watch, name="petra-watchdog", daemon=True)
        self._guard = threading.Thread(target=self._guard_store, name="petra-watchdog-store", daemon=True)
        self._poll()
        self._thread.start()
        self._guard.start()

    def report_failure(self, message: str) -> bool:
        """Report why this process fails.

        Args:
            message: The reason.

        Returns:
            Whether this is the first report of the job, so that this process prints it.
        """
        with self._lock:
            if self._reported:
                return False
            try:
                stored = self._store.compare_set("failure", "", json.dumps([self._process, message]))
                self._reported = bool(json.loads(stored)[0] == self._process)
            except RuntimeError:
                # The store is gone, so processes cannot agree on who reports. Process 0 may have gone with it, unless
                # the store was the launcher's.
                self._reported = self._process <= (1 if self._generation is None else 0)
            return self._reported

    def diagnose(self, error: Exception) -> str | None:
        """Find the cause of a lost connection.

        Args:
            error: The error of the transport.

        Returns:
            A message that names the process that is gone, or the error itself if none is; None if another process
            has reported a failure.
        """
        for _ in range(int(2 * DIAGNOSIS_TIMEOUT / INTERVAL)):
            time.sleep(INTERVAL / 2)
            try:
                if self._failure_of_others() is not None:
                    return None
            except RuntimeError:
                break
            quietest = max(list(self._last_seen), key=self._silence, default=None)
            if quietest is not None and self._silence(quietest) > SILENCE_LIMIT:
                return self._describe_lost(quietest)
        return str(error)

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        self._thread.join(timeout=2 * SILENCE_LIMIT)  # it may be in a call to the store
        self._guard.join(timeout=2 * INTERVAL)

    def _watch(self) -> None:
        while not self._wait():
            try:
                if self._is_over():
                    self._leave_generation()
                    return
                self._poll()
                failure = self._failure_of_others()
            except Exception as error:  # whatever the error is, an unwatched job must not continue
                if isinstance(error, RuntimeError) and self._connects_again():
                    continue
                if not self._closing.wait(2 * SILENCE_LIMIT):
                    reason = first_line(error)
                    self._abort(f"the store of the job is gone, and with it the process that holds it ({reason})")
                return
            if failure is not None and not self._closing.wait(2 * INTERVAL):
                # Another process has reported a failure. This one may wait for a message that will never come.
                self._exit(1)

    def _leave_generation(self) -> None:
        """Interrupt communication, and end this process if it is stuck in something else."""
        generation, seconds = self._generation, 0.0
        assert generation is not None
        generation.interrupt()
        while not self._closing.wait(self._interval):
            seconds += self._interval
            limit = min(CONNECT_PATIENCE, self._timeout) if generation.connecting() else self._timeout
            if seconds >= limit:
                name = self._names[self._process]
                generation.membership.replace_this_process(
                    f"{name} is replaced: it has not reacted to the loss of a process for {seconds:.0f} s. It was in "
                    f"{_describe(self._activity.tick, self._activity.what, None)} ({_calls_of_main_thread()})"
                )
                return

    def _connects_again(self) -> bool:
        """Ask for another generation, in which all connections are new; return whether the store still answers."""
        if self._generation is None:
            return False
        with suppress(RuntimeError):  # the launcher is gone
            self._generation.membership.ask_for_another(self._generation.roster)
            return True
        return False

    def _wait(self) -> bool:
        """Wait until the next poll, or until the generation is over; return whether to stop watching."""
        if self._generation is None:
            return self._closing.wait(self._interval)
        parts = round(self._interval / GENERATION_INTERVAL)
        for _ in range(parts):
            if self._closing.wait(self._interval / parts):
                return True
            with suppress(RuntimeError):  # the next poll reports it
                if self._is_over():
                    break
        return False

    def _is_over(self) -> bool:
        """Return whether another generation has begun."""
        found = self._generation
        return found is not None and found.membership.generation != found.roster.generation

    def _guard_store(self) -> None:
        """End this process if the store does not answer: behind a broken network, a call may never return."""
        polls, silent, limit = self._polls, 0, max(self._timeout, STORE_LIMIT)
        while not self._closing.wait(INTERVAL) and self._thread.is_alive():
            polls, silent = self._polls, silent + 1 if self._polls == polls else 0
            if silent * INTERVAL > limit:
                if self._generation is None or self._process == 0:  # else the store is on this machine, for all alike
                    message = f"{self._names[self._process]}: the store of the job has not answered for {limit:.0f} s"
                    print(f"petra: error: {message}: check the network", file=sys.stderr, flush=True)
                self._exit(1)

    def _poll(self) -> None:
        """Publish the status of this process, and read those of the others."""
        activity = self._activity
        self._polls += 1
        if activity.times != self._last_progress[0]:
            self._last_progress = activity.times, self._polls
        seconds = (self._polls - self._last_progress[1]) * self._interval
        suspects = []
        # Setting up has no limit, because reading and decoding data may take long.
        if activity.set_up and not activity.waits and seconds > SUSPICION * self._timeout:
            suspects.append(self._process)
            if seconds > self._timeout:
                name = self._names[self._process]
                message = f"{name} is stuck in tick {activity.tick}, {activity.what}, for {seconds:.0f} s"
                self._report_lost(self._process, message)
        keys = [f"status/{process}" for process in range(len(self._names)) if process != self._process]
        own = [activity.tick, activity.what, activity.waiting_for, activity.waits, activity.times]
        status = json.dumps([self._polls, *own])
        with self._lock:
            self._store.set(f"status/{self._process}", status)
            present = [key for key in keys if self._store.check([key])]
            texts = [self._store.get(key).decode() for key in present]
        for key, text in zip(present, texts, strict=True):
            process = int(key.rsplit("/")[-1])
            if self._last_seen.get(process, ("", 0))[0] != text:
                self._last_seen[process] = text, self._polls
            elif self._silence(process) > SUSPICION * self._timeout:
                suspects.append(process)
                if self._silence(process) > self._timeout:
                    self._report_lost(process, self._describe_lost(process))
        if suspects and self._generation is not None:
            self._generation.membership.report_suspects(self._generation.roster, suspects)
        self._check_deadlock(own, not suspects)

    def _check_deadlock(self, own: list[Any], all_alive: bool) -> None:
        """End the job if all processes are alive and wait for each other: a message was lost."""
        known = {process: json.loads(text)[1:] for process, (text, _) in self._last_seen.items()}
        for process, activity in {**known, self._process: own}.items():
            if self._last_change.get(process, ([], 0))[0] != activity:
                self._last_change[process] = activity, self._polls
        everyone = len(self._last_change) == len(self._names)
        quiet = self._polls - max(poll for _, poll in self._last_change.values())
        if (
            all_alive
            and everyone
            and quiet * self._interval > self._timeout
            and all(waits for (*_, waits, _), _ in self._last_change.values())
        ):
            where = _describe(*own[:3])
            message = f"all ranks have waited for {self._timeout:.0f} s, {self._names[self._process]} in {where}"
            self._report_lost(self._process, f"{message}: a message was lost")

    def _report_lost(self, process: int, message: str) -> None:
        """Have a process replaced, or end the job."""
        if self._generation is None:
            self._abort(message)
        else:
            self._generation.membership.report_lost(self._generation.roster, process, message)

    def _silence(self, process: int) -> float:
        """Return the seconds since the last new status of a process; more have passed if polls took long."""
        return (self._polls - self._last_seen[process][1]) * self._interval

    def _failure_of_others(self) -> list[Any] | None:
        with self._lock:
            if not self._store.check(["failure"]):
                return None
            report = json.loads(self._store.get("failure").decode() or "null")
        return None if report is None or report[0] == self._process else list(report)

    def _describe_lost(self, process: int) -> str:
        _, tick, what, waiting_for, *_ = json.loads(self._last_seen[process][0])
        own = self._activity
        return (
            f"{self._names[process]} is gone or stuck: last heard from in {_describe(tick, what, waiting_for)}; "
            f"{self._names[self._process]} is in {_describe(own.tick, own.what, own.waiting_for)}"
        )

    def _abort(self, message: str) -> None:
        with self._lock:  # keeps the main thread from exiting before the message is printed
            if self._reported:
                return  # the main thread prints its own report and exits
            if self.report_failure(message):
                print(f"petra: error: {message}", file=sys.stderr, flush=True)
            self._exit(1)


def _describe(tick: int, what: str, waiting_for: int | None) -> str:
    return f"tick {tick}, {what}" + (f", waiting for rank {waiting_for}" if waiting_for is not None else "")


def _calls_of_main_thread() -> str:
    """Return the innermost calls of the main thread, for a message."""
    calls: list[str] = []
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and len(calls) < 4:  # without the source, because reading files may be what is stuck
        calls.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return ", called by ".join(calls)
