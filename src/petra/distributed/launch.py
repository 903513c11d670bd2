"""Starts the processes of a job on this machine, without torchrun, and replaces those that are lost."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from petra.distributed.fork_server import ForkServer, StartedProcess
from petra.distributed.membership import (
    DONE,
    MEMBER,
    PROGRESS,
    REPLACEMENT,
    Roster,
    call_key,
    lost_key,
    publish,
    renewal_key,
    suspects_key,
)

PATIENCE = 15.0
"""Seconds that the other processes have to end after one has failed; more than `watchdog.SILENCE_LIMIT`."""
LOSSES_WITHOUT_PROGRESS = 3
"""Losses in a row after which a job ends that makes no progress between them."""
POLL = 0.02
"""Seconds between two polls of the processes."""
LOSS_WINDOW = 5.0
"""Seconds within which several losses count as one."""
SUSPICION_WINDOW = 5.0
"""Seconds without a new report after which a process is not suspected any more."""
STOP_WINDOW = 10.0
"""Seconds after the start of a generation in which a process may miss a signal to stop."""


@dataclass(frozen=True)
class Recovery:
    """How a job continues when it loses a process."""

    replacements: int = 10
    """How many new processes are started; after that, the other processes take over the stages of lost ones."""
    spares: int = 0
    """Processes that have been started and wait, ready to replace a lost one."""


def launch_ranks(
    arguments: Sequence[str],
    processes: int,
    module: str = "petra",
    *,
    replicas: int = 1,
    recovery: Recovery | None = None,
) -> int:
    """Run a command in several processes of one job.

    The processes find each other as under torchrun, through the same environment variables and a store in this
    process. All of them have ended when this function returns.

    Args:
        arguments: The arguments of the command.
        processes: The number of processes.
        module: The module to run with `python -m`.
        replicas: The number of replicas that the processes form.
        recovery: What happens when a process is lost; None ends the job.

    Returns:
        0, or the largest exit code of the processes.
    """
    with ForkServer(module, arguments) as server:
        return _launch(Launcher(server.start, processes, replicas, recovery))


def _launch(launcher: Launcher) -> int:
    """Run the processes; they get the signals of this process, and none is left."""
    handlers: dict[int, Any] = {n: signal.signal(n, launcher.stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        return launcher.run()
    finally:
        launcher.kill_all()
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Launcher:
    """The processes of one job.

    Args:
        start: Starts a process with the given environment variables beside those of this process.
        processes: The number of processes.
        replicas: The number of replicas that they form.
        recovery: What happens when a process is lost; None ends the job.
    """

    def __init__(
        self,
        start: Callable[[Mapping[str, str]], StartedProcess],
        processes: int,
        replicas: int,
        recovery: Recovery | None,
    ) -> None:
        self._start_process, self._replicas, self._recovery = start, replicas, recovery
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._started: list[StartedProcess] = []  # by the number of the process
        self._roster = Roster(0, tuple(range(processes)))
        self._spares: list[int] = []
        self._early: list[int] = []  # those of them that were started because of a suspicion
        self._replacements = 0 if recovery is None else recovery.replacements
        self._losses, self._last_loss, self._progress = 0, -LOSS_WINDOW, -1  # since the job last made progress
        self._stopped, self._published = False, 0.0
        self._suspicion = 0.0  # when the last report of suspects came

    def run(self) -> int:
        """Start the processes, and wait until all have ended.

        Returns:
            0, or the largest exit code of the processes.
        """
        if self._recovery is not None:
            publish(self._store, self._roster)
        for _ in self._roster.members:
            if not self._stopped:
                self._start()
        for _ in range(self._recovery.spares if self._recovery is not None else 0):
            if not self._stopped:
                self._spares.append(self._start())
        if self._stopped:  # a process that was being started then was not in the list yet
            self._forward()
        self._wait()
        return self._exit_code()

    def stop(self, number: int, frame: object) -> None:
        """Ask all processes to end; a signal handler."""
        self._stopped = True
        if self._roster.generation > 0 and time.monotonic() - self._published < STOP_WINDOW:
            publish(self._store, Roster(self._roster.generation + 1, ()))  # processes that connect have no handler
        self._forward()

    def kill_all(self) -> None:
        """Kill the processes that are left."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _forward(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # unlike SIGINT, it prints nothing while Python still starts

    def _start(self, slot: int | None = None) -> int:
        """Start the next process, for the position of a lost one, and return its number."""
        number, processes = len(self._started), len(self._roster.members)
        variables = {
            "RANK": str(number),
            "LOCAL_RANK": str(number % processes if slot is None else slot),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if self._recovery is not None:
            variables[MEMBER] = str(number)
            if number not in self._roster.members or self._roster.generation > 0:
                variables[REPLACEMENT] = "1"
        self._started.append(self._start_process(variables))
        return number

    def _wait(self) -> None:
        deadline = float("inf")
        while time.monotonic() < deadline:
            codes = self._codes()
            if None not in codes.values():
                return
            if deadline == float("inf") and any(codes.values()):
                lost = [member for member, code in codes.items() if code is not None and code < 0]
                failed = any(code is not None and code > 0 for code in codes.values())
                if failed or 0 in codes.values() or not self._recover(lost, codes):
                    deadline = time.monotonic() + PATIENCE
            if self._recovery is not None and not self._stopped:
                self._read_reports()
                self._end_early()
            time.sleep(POLL)

    def _codes(self) -> Mapping[int, int | None]:
        """Return the exit codes of the current processes; negative for signals, None for those that run."""
        return {member: self._started[member].poll() for member in self._roster.members if member < len(self._started)}

    def _recover(self, lost: Sequence[int], codes: Mapping[int, int | None]) -> bool:
        """Begin a generation without the lost processes; return whether that is possible."""
        if self._recovery is None or self._stopped or self._store.check([DONE]):
            return False
        who = " and ".join(f"process {member} was ended by {_signal(codes[member])}" for member in lost)
        if not self._may_go_on(who):
            return False
        members = list(self._roster.members)
        for member in lost:
            position = members.index(member)
            if (other := self._replacement(position)) is None:
                members.pop(position)
            else:
                members[position] = other
        size = len(members) // self._replicas * self._replicas
        if size == 0:
            self._end(f"{who}: the job ends, because no process can take over")
            return False
        replaced = len(members) == len(self._roster.members)
        self._spares += members[size:]
        self._publish(members[:size])
        _print(f"{who}: {'another one takes its place' if replaced else 'the other processes take over its stages'}")
        while len(self._spares) < self._recovery.spares and self._replacements > 0:
            self._replacements -= 1
            self._spares.append(self._start())
        return True

    def _may_go_on(self, who: str) -> bool:
        """Return whether the job has made progress between the last losses; otherwise end it."""
        progress = int(self._store.get(PROGRESS)) if self._store.check([PROGRESS]) else -1
        if progress != self._progress:  # less, if all have started again from a checkpoint
            self._losses, self._progress = 0, progress
        now = time.monotonic()
        if self._losses == 0 or now - self._last_loss > LOSS_WINDOW:
            self._losses, self._last_loss = self._losses + 1, now
        if self._losses > LOSSES_WITHOUT_PROGRESS:
            self._end(f"{who}: the job ends, because it has lost processes {self._losses} times without progress")
        return self._losses <= LOSSES_WITHOUT_PROGRESS

    def _replacement(self, position: int) -> int | None:
        """Return a process for the position of a lost one, a spare or a new one; None if there is none."""
        while self._spares:
            if self._started[spare := self._spares.pop(0)].poll() is None:
                return spare
        if self._replacements == 0:
            return None
        self._replacements -= 1
        return self._start(position)

    def _read_reports(self) -> None:
        """Do what the processes ask for."""
        generation = self._roster.generation
        if self._store.check([call_key(generation)]):
            self._store.delete_key(call_key(generation))
            self._start_early()
            self._end_lost()
            self._renew()

    def _start_early(self) -> None:
        """Start a process for each one that is suspected to be lost, so that it is ready when that is certain."""
        key = suspects_key(self._roster.generation)
        if not self._store.check([key]):
            return
        suspects = json.loads(self._store.get(key))
        self._store.delete_key(key)
        self._suspicion = time.monotonic()
        for suspect in suspects[len(self._spares) :]:
            if self._replacements > 0:
                self._replacements -= 1
                self._early.append(self._start(self._roster.members.index(suspect)))
                self._spares.append(self._early[-1])

    def _end_early(self) -> None:
        """End the processes that have been started for suspects which are not suspected any more."""
        if self._early and time.monotonic() - self._suspicion > SUSPICION_WINDOW:
            for process in set(self._early) & set(self._spares):
                self._spares.remove(process)
                self._kill(process)
                self._replacements += 1
            self._early.clear()

    def _renew(self) -> None:
        """Begin a generation of the same processes, because one of them has lost a message or a connection."""
        who = "a message or a connection was lost"
        if self._store.check([renewal_key(self._roster.generation)]) and self._may_go_on(who):
            self._publish(self._roster.members)
            _print(f"{who}: all processes connect again")

    def _publish(self, members: Sequence[int]) -> None:
        """Begin a generation."""
        self._roster = Roster(self._roster.generation + 1, tuple(members))
        self._published = time.monotonic()
        publish(self._store, self._roster)

    def _end(self, reason: str) -> None:
        _print(f"{reason}; --resume continues from the last checkpoint, if there is one")
        publish(self._store, Roster(self._roster.generation + 1, ()))

    def _end_lost(self) -> None:
        """Kill a process that others report as stuck, so that it can be replaced."""
        key = lost_key(self._roster.generation)
        if self._store.check([key]):
            member, reason = json.loads(self._store.get(key))
            if self._started[member].poll() is None:
                _print(reason)
                self._kill(member)

    def _kill(self, member: int) -> None:
        self._started[member].kill()
        self._started[member].wait()

    def _exit_code(self) -> int:
        codes = self._codes()
        if self._stopped and any(codes.values()):
            if 130 not in codes.values():  # else one of them has reported it
                _print("stopped; --resume continues from the last checkpoint, if there is one")
            return 130
        for member, code in codes.items():
            if code is not None and code < 0:
                _print(f"process {member} was ended by {_signal(code)}")
        return max((1 if code is None or code < 0 else code for code in codes.values()), default=1)


def _signal(code: int | None) -> str:
    assert code is not None
    return signal.Signals(-code).name


def _print(text: str) -> None:
    print(f"petra: {text}", file=sys.stderr, flush=True)
