"""Starts the ranks of a job on this machine, without torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

PATIENCE = 15.0
"""Seconds that the other processes have to end after one has failed; more than `watchdog.DOUBT`."""


def launch_ranks(arguments: Sequence[str], processes: int, module: str = "petra") -> int:
    """Run a command in several processes of one job.

    The processes find each other as under torchrun, through the same environment variables and a store in this
    process. All of them have ended when this function returns.

    Args:
        arguments: The arguments of the command.
        processes: The number of processes.
        module: The module to run with `python -m`.

    Returns:
        0, or the largest exit code of the processes.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []

    def forward(number: int, frame: object) -> None:
        signals.append(number)
        for process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # unlike SIGINT, it prints nothing while Python still starts

    handlers: dict[int, Any] = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(processes):
            if signals:
                break
            variables = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            }
            # In its own session, so that Ctrl-C reaches it once, through this process.
            command = [sys.executable, "-m", module, *arguments]
            started.append(subprocess.Popen(command, env=variables, start_new_session=True))  # noqa: S603
        if signals:  # perhaps while a process was being started, which was not in the list yet
            forward(signals[0], None)
        return _wait(started, signals)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(started: list[subprocess.Popen[bytes]], signals: list[int]) -> int:
    deadline = float("inf")
    while any(process.poll() is None for process in started) and time.monotonic() < deadline:
        if deadline == float("inf") and any(process.poll() for process in started):
            deadline = time.monotonic() + PATIENCE
        time.sleep(0.05)
    codes = [process.poll() for process in started]
    if signals and any(codes):
        if 130 not in codes:  # else one of them has reported it
            print("petra: stopped; --resume continues from the last checkpoint, if there is one", file=sys.stderr)
        return 130
    for process, code in enumerate(codes):
        if code is not None and code < 0:
            print(f"petra: process {process} was ended by {signal.Signals(-code).name}", file=sys.stderr)
    return max(1 if code is None or code < 0 else code for code in codes)
