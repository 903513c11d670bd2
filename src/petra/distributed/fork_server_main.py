"""The program of the fork server: `python -m petra.distributed.fork_server_main DESCRIPTOR MODULE ARGUMENT…`.

It imports what the processes need, and forks one for every request of `fork_server.ForkServer`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from petra.distributed.fork_server import PRELOADED, READY

POLL = 0.01
"""Seconds between two polls of the processes."""
_PR_SET_NAME = 15  # as in sys/prctl.h


def main(descriptor: str, module: str, *arguments: str) -> None:
    """Serve; in a forked process, run the module.

    Args:
        descriptor: The file descriptor of the connection to the `ForkServer`.
        module: The module that the processes run, as `python -m` does.
        arguments: The command-line arguments of the processes.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # the collector does not write to these objects, so that the processes share their memory
    with Connection(int(descriptor)) as connection:
        # From now on, `ForkServer` sends signals for the processes, and SIGTERM does not mean this one.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        variables = serve(connection)
    if variables is not None:
        run(variables, module, arguments)


def serve(connection: Connection) -> dict[str, str] | None:
    """Fork processes until the other end closes the connection.

    Returns:
        The environment variables of a forked process; in the server, None.
    """
    numbers: dict[int, int] = {}  # of the processes, by their process identifier
    with suppress(EOFError, OSError):  # nobody reads any more
        connection.send_bytes(READY)
        while True:
            if connection.poll(POLL):
                number, request = json.loads(connection.recv_bytes())
                if isinstance(request, dict):
                    if (identifier := os.fork()) == 0:
                        return {str(name): str(value) for name, value in request.items()}
                    numbers[identifier] = number
                else:
                    for identifier in [one for one, found in numbers.items() if found == number]:
                        os.kill(identifier, request)
            while numbers and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(ended[1])
                connection.send_bytes(json.dumps([numbers.pop(ended[0]), code]).encode())
    return None


def run(variables: dict[str, str], module: str, arguments: Sequence[str]) -> None:
    """Become a process of the job."""
    import torch

    os.setsid()  # Ctrl-C reaches it once, through the process that started the job
    for number in (signal.SIGTERM, signal.SIGINT):  # without a traceback, until the command has its own handlers
        signal.signal(number, signal.SIG_DFL)
    os.environ.update(variables)
    if sys.platform != "linux" or torch.cuda._is_in_bad_fork():
        # Other systems' libraries may not work after a fork, nor does CUDA if an import has called it.
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606
    _name_process(f"petra-{variables.get('RANK', '')}")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _name_process(name: str) -> None:
    """Set the name that `ps` and `top` show, up to 15 characters."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
