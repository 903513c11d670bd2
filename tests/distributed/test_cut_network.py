"""A process whose network is cut ends, whatever it waits for. A proxy that stops to forward stands for the network."""

import os
import socket
import sys
import threading
from contextlib import suppress

import pytest
from helpers import fork_server
from torch.distributed import TCPStore

from petra.distributed import watchdog

SMALL = [
    *("train", "--model", "revnet18", "--width", "4", "--depths", "1,1", "--stages", "4"),
    *("--data", "synthetic:1x8x8:10:1437", "--batch-size", "16", "--epochs", "500", "--lr", "0.01"),
    *("--threads", "1", "--device", "cpu", "--quiet", "--timeout", "2"),
]
LIMIT = 60


class Proxy:
    """Forwards connections to a port until `cut`; then everything stays open, and nothing arrives."""

    def __init__(self, port):
        self._port, self._cut, self._closed = port, threading.Event(), threading.Event()
        self._sockets, self._threads = [], []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._start(self._accept)

    def cut(self):
        self._cut.set()

    def close(self):
        self._closed.set()
        for one in (self._server, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(LIMIT)

    def _start(self, target, *arguments):
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [client, server]
                for source, to in ((client, server), (server, client)):
                    self._start(self._forward, source, to)

    def _forward(self, source, to):
        with suppress(OSError):
            while data := source.recv(65536):
                if self._cut.is_set():
                    self._closed.wait()  # both ends stay open
                to.sendall(data)


def rank_main(rank, port, folder, log, started):
    from petra.cli.main import main
    from petra.runs.run import Run

    variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    watchdog.STORE_LIMIT = 4.0
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
    Run.on_start.append(lambda run: started.set())
    sys.exit(main([*SMALL, "--out", folder]))


@pytest.mark.timeout(3 * LIMIT)  # so that it is the exit codes that fail
def test_both_processes_end_when_one_does_not_reach_the_store(tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    proxy = Proxy(store.port)
    started = fork_server.context().Event()
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = [
        fork_server.start(rank_main, rank, port, str(tmp_path / "run"), str(log), started)
        for rank, port, log in zip(range(2), (store.port, proxy.port), logs, strict=True)
    ]
    try:
        assert started.wait(LIMIT)
        proxy.cut()
        for process in ranks:
            process.join(LIMIT)
        assert [process.exitcode for process in ranks] == [1, 1]
    finally:
        for process in ranks:
            process.kill()
        proxy.close()
    said = "".join(log.read_text() for log in logs)
    assert "rank 1 is gone or stuck" in said
