"""Starts the ranks of a job on this machine, where torchrun is more than is needed."""

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
"""Seconds that the others have to leave by themselves once one of them has failed, more than `watchdog.DOUBT`."""


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run ``petra ARGUMENTS`` in so many processes that can meet; 0, or the largest of their exit codes.

    The processes find each other as under torchrun, through the same variables and a store that this process holds.
    None is left when this returns.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def forward(number: int, frame: object) -> None:
        asked.append(number)
        for process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # which, unlike Ctrl-C, is quiet while they still start

    usual: dict[int, Any] = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(processes):
            if asked:
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
            # A group of their own: Ctrl-C reaches them once, through this process.
            command = [sys.executable, "-m", "petra", *arguments]
            started.append(subprocess.Popen(command, env=variables, start_new_session=True))  # noqa: S603
        if asked:  # perhaps while one of them was being started, which has not heard of it
            forward(asked[0], None)
        return _wait(started, asked)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()
        for number, handler in usual.items():
            signal.signal(number, handler)


def _wait(started: list[subprocess.Popen[bytes]], asked: list[int]) -> int:
    deadline = float("inf")
    while any(process.poll() is None for process in started) and time.monotonic() < deadline:
        if deadline == float("inf") and any(process.poll() for process in started):
            deadline = time.monotonic() + PATIENCE
        time.sleep(0.05)
    codes = [process.poll() for process in started]
    if asked and any(codes):
        if 130 not in codes:  # else one of them has said it
            print("petra: stopped at once; --resume goes on from the last checkpoint, if there is one", file=sys.stderr)
        return 130
    for process, code in enumerate(codes):
        if code is not None and code < 0:
            print(f"petra: process {process} was ended by {signal.Signals(-code).name}", file=sys.stderr)
    return max(1 if code is None or code < 0 else code for code in codes)
