"""What a job must not leave behind."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from soak.jobs import Attempt

LISTENS = "0A"
"""The state of a socket that waits for connections, in the tables of Linux."""


def store_ports(attempt: Attempt) -> set[int]:
    """Return the ports of the stores at which the processes of a job meet: those at which the launcher listens."""
    pid = attempt.process.pid
    found = set()
    with suppress(OSError):  # it has ended
        sockets = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                address, state, inode = (line.split()[column] for column in (1, 3, 9))
                if state == LISTENS and f"socket:[{inode}]" in sockets:
                    found.add(int(address.split(":")[1], 16))
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


def remove_temporary_files(attempt: Attempt) -> None:
    """Empty the folder for temporary files."""
    shutil.rmtree(attempt.temporary)
    attempt.temporary.mkdir()


def _files(run: Path) -> set[str]:
    """The files of a run, with checkpoints of any number."""
    paths = (str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    return {re.sub(r"/\d{6}/", "/NUMBER/", path) for path in paths}
