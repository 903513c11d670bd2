import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from petra.distributed import fork_server_main
from petra.distributed.fork_server import ForkServer

pytestmark = pytest.mark.timeout(120)

MODULE = "helpers.forked_program"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def server(folder):
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        server = ForkServer(MODULE, [str(folder), "--more", "an argument"])
    with server:
        yield server


def start(server, rank, do):
    return server.start({"RANK": str(rank), "DO": do})


def found(folder, rank):
    """What a process has written about itself."""
    file = folder / str(rank)
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return json.loads(file.read_text())


def test_a_process_is_what_python_would_start(server, folder):
    assert start(server, 10, "0").wait() == 0
    process = found(folder, 10)
    assert process["arguments"] == [str(folder), "--more", "an argument"]
    assert process["main"] == MODULE
    assert process["leads_session"]
    assert process["threads"] == 1
    assert process["name"] == "petra-10"
    same = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_CURRENT_TEST")}
    assert {name: process["environment"].get(name) for name in same} == same
    assert process["environment"]["RANK"] == "10"


def test_nothing_is_imported_again(server, folder):
    processes = [start(server, rank, "0") for rank in (11, 12)]
    assert [process.wait() for process in processes] == [0, 0]
    for rank in (11, 12):
        assert found(folder, rank)["imported"] == ["torch", "torch._dynamo", "petra.cli.train"]
    assert found(folder, 11)["parent"] == found(folder, 12)["parent"] != os.getpid()


def test_exit_codes(server):
    processes = [start(server, rank, code) for rank, code in ((20, "2"), (21, "0"), (22, "1"))]
    assert [process.wait() for process in processes] == [2, 0, 1]
    assert [process.poll() for process in processes] == [2, 0, 1]


@pytest.mark.parametrize(("rank", "number"), [(30, signal.SIGTERM), (31, signal.SIGKILL), (32, signal.SIGINT)])
def test_signals(server, folder, rank, number):
    """They act as on a process that Python has started, although the server ignores SIGTERM."""
    process, other = start(server, rank, "wait"), start(server, rank + 10, "wait")
    found(folder, rank)
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait() == -number
    process.send_signal(signal.SIGTERM)  # too late, which is no error
    assert other.poll() is None
    other.kill()
    assert other.wait() == -signal.SIGKILL


def test_a_signal_from_outside(server, folder):
    process = start(server, 50, "wait")
    os.kill(found(folder, 50)["pid"], signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_signal_handler_may_ask_while_the_answer_is_read(server, monkeypatch):
    """A launcher forwards signals from a handler, which may interrupt anything."""
    process, receive = start(server, 60, "3"), server._connection.recv_bytes
    asked = []

    def interrupted():
        asked.append(process.poll())
        return receive()

    connection = type("Interrupted", (), {"poll": server._connection.poll, "recv_bytes": staticmethod(interrupted)})
    monkeypatch.setattr(server, "_connection", connection)
    assert process.wait() == 3
    assert asked == [None]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_before_anything_is_imported(number, tmp_path):
    with ForkServer(MODULE, [str(tmp_path)]) as server:
        processes = [start(server, rank, "wait") for rank in range(2)]
        processes[0].send_signal(number)
        assert [process.wait() for process in processes] == [-number] * 2
        assert not server._ready
    assert os.listdir(tmp_path) == []


def test_the_processes_of_a_server_that_is_lost_count_as_lost(tmp_path, monkeypatch):
    with ForkServer(MODULE, [str(tmp_path)]) as server:
        process = start(server, 0, "wait")
        server._server.kill()
        assert process.wait() == -signal.SIGKILL
        assert start(server, 1, "wait").wait() == -signal.SIGKILL


def test_the_server_ends_with_its_launcher(folder):
    """Its connection is closed when the launcher ends, however it ends."""
    server = ForkServer(MODULE, [str(folder)])
    server._connection.close()
    assert server._server.wait(60) == 0


@pytest.mark.parametrize(("platform", "bad"), [("linux", True), ("darwin", False)])
def test_where_a_fork_is_not_enough_python_starts_again(platform, bad, monkeypatch):
    executed = []

    def execute(path, command):
        executed.append([path, command, os.environ["RANK"]])
        raise SystemExit

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: bad)
    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setattr(os, "setsid", lambda: None)
    with pytest.raises(SystemExit):
        fork_server_main.run({"RANK": "3"}, "petra", ["train", "--ranks", "2"])
    command = [sys.executable, "-m", "petra", "train", "--ranks", "2"]
    assert executed == [[sys.executable, command, "3"]]
