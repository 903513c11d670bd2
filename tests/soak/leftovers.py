"""What a job must not leave behind."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection
from pathlib import Path

from soak.jobs import Attempt


def store_ports(attempt: Attempt) -> set[int]:
    """Return the ports of the stores at which the processes of a job meet."""
    found = set()
    for pid in attempt.processes():
        try:
            variables = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {int(text.split(b"=")[1]) for text in variables if text.startswith(b"MASTER_PORT=")}
    return found


def leftovers(attempt: Attempt, ports: Collection[int]) -> list[str]:
    """Return what an attempt that has ended has left."""
    found = [f"process {pid}" for pid in attempt.processes()]
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                found.append(f"port {port}")
    for name in os.listdir("/dev/shm"):
        if attempt.seen & {int(number) for number in re.findall(r"\d+", name)}:
            found.append(f"/dev/shm/{name}")
    return found


def unexpected_files(run: Path, complete: Path) -> list[str]:
    """Return the files that an unbroken run has not, or that only an unbroken run has."""
    return sorted(f"file {name}" for name in _files(run) ^ _files(complete))


def temporary_files(attempt: Attempt, worker_ended: bool = False) -> list[str]:
    """Return the files in the folder for temporary files, without the empty cache that PyTorch creates there.

    Args:
        attempt: The attempt.
        worker_ended: A signal has ended a data worker, which so could not remove the socket of `multiprocessing`.
    """
    expected = ("torchinductor", "pymp-", "listener-") if worker_ended else ("torchinductor",)
    paths = [path for path in attempt.temporary.rglob("*") if not path.is_dir() or path.parent == attempt.temporary]
    return sorted(f"temporary file {path.name}" for path in paths if not path.name.startswith(expected))


def _files(run: Path) -> set[str]:
    """The files of a run, with checkpoints of any number."""
    paths = (str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    return {re.sub(r"/\d{6}/", "/NUMBER/", path) for path in paths}
