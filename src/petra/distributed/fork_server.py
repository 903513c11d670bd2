"""Starts processes in milliseconds: they are forked from a process that has imported PyTorch."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol

PRELOADED = ("petra.cli.main", "petra.cli.train", "torch._dynamo")
"""What the server imports; the first optimizer of a process imports `torch._dynamo`."""
READY = b"ready"
POLL = 0.01
"""Seconds between two polls of a process that is waited for."""


class StartedProcess(Protocol):
    """A process, with the methods of `subprocess.Popen` that a launcher uses."""

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...

    def kill(self) -> None: ...


class ForkServer:
    """A process that others are forked from, so that they do not import PyTorch again.

    The server does nothing but import modules, so that forking it is safe. A request is answered when the imports are
    complete; `start` does not wait for that.

    Args:
        module: The module that the processes run, as `python -m` does.
        arguments: Their command-line arguments.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", "petra.distributed.fork_server_main", str(theirs.fileno()), module]
        # In its own session, so that Ctrl-C does not reach it.
        self._server = subprocess.Popen(  # noqa: S603
            [*command, *arguments], pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()
        self._running: dict[int, ForkedProcess] = {}
        self._count, self._ready, self._reading = 0, False, False
        self._early_signal = signal.SIGKILL  # the last one that was sent before the server was ready

    def start(self, variables: Mapping[str, str]) -> ForkedProcess:
        """Start a process.

        Args:
            variables: Its environment variables beside those of this process.

        Returns:
            The process.
        """
        process = ForkedProcess(self, self._count)
        self._running[self._count] = process
        self._count += 1
        self._request(process, dict(variables))
        return process

    def send_signal(self, process: ForkedProcess, number: int) -> None:
        """Send a signal to a process. If nothing has been forked yet, it ends the server and so all processes."""
        self.update()
        if process.returncode is None:
            self._request(process, int(number))
            if not self._ready:
                self._early_signal = signal.Signals(number)
                self._server.terminate()  # which it ignores from the moment it is ready

    def update(self) -> None:
        """Read which processes have ended."""
        if self._reading:  # a signal handler has interrupted the call that reads
            return
        self._reading = True
        try:
            while self._connection.poll():
                if (message := self._connection.recv_bytes()) == READY:
                    self._ready = True
                else:
                    number, code = json.loads(message)
                    self._running.pop(number).returncode = code
        except (EOFError, OSError):  # the server has ended
            for process in self._running.values():
                process.returncode = -(signal.SIGKILL if self._ready else self._early_signal)
            self._running.clear()
        finally:
            self._reading = False

    def close(self) -> None:
        """End the server. Processes that still run are not waited for."""
        self._connection.close()
        self._server.kill()
        self._server.wait()

    def _request(self, process: ForkedProcess, request: dict[str, str] | int) -> None:
        with suppress(OSError):  # the server has ended, which `update` finds out
            self._connection.send_bytes(json.dumps([process.number, request]).encode())

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ForkedProcess:
    """A process of a `ForkServer`, with the methods of `subprocess.Popen` that a launcher uses.

    Args:
        server: The server.
        number: The number of the process among those of the server.
    """

    def __init__(self, server: ForkServer, number: int) -> None:
        self._server, self.number = server, number
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; the negative signal that has ended it, or None while it runs."""
        self._server.update()
        return self.returncode

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        while (code := self.poll()) is None:
            time.sleep(POLL)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal; a process that has ended ignores it."""
        self._server.send_signal(self, sig)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)
