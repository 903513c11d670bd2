"""A rank that is interrupted does not wait for a message of which a part has arrived or left."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import fork_server

from petra.distributed import LostRank, ProcessTransport, process_groups
from petra.distributed.io_thread import IOThread, Task, close_threads
from petra.distributed.packed_state import StatePacker
from petra.distributed.process_groups import UNUSED_TAG
from petra.pipeline.message_layout import layout_of
from petra.schedule import Action, Kind

LIMIT = 120
LARGE = 2**24
"""Elements of 4 bytes, more than the buffers of the system hold."""
ACTION = Action(0, Kind.FORWARD, 0)


def send(transport, other):
    transport.send(other, ACTION, (torch.ones(LARGE),))
    transport.flush()


def receive(transport, other):
    transport.receive(other, ACTION, layout_of((torch.ones(LARGE),)))()


def states(first, second):
    """Return functions that move a state from one process to another, for both of them."""
    state = [StatePacker().pack({"weights": torch.ones(LARGE)})]
    move = lambda transport, _: transport.move_state(state, first, second)  # noqa: E731
    return move, move


CASES = {
    "receive": lambda: (receive, send),
    "send": lambda: (send, receive),
    "receive a state": lambda: states(1, 0),
    "send a state": lambda: states(0, 1),
}


def stopping_after(function):
    """Return a function that starts to move data and then stops this process, long before all data has moved."""

    def wrapped(*arguments, **options):
        time.sleep(0.2)  # until the other rank has posted its part
        found = function(*arguments, **options)
        os.kill(os.getpid(), signal.SIGSTOP)
        return found

    return wrapped


def stop_while_data_moves(groups):
    """Stop this process in the middle of the first large message."""
    groups.post_send, groups.post_receive = stopping_after(groups.post_send), stopping_after(groups.post_receive)
    for blocking, starts in (("send", stopping_after(dist.isend)), ("recv", stopping_after(dist.irecv))):
        small = getattr(dist, blocking)
        choose = lambda tensor, *rest, small=small, starts=starts, **more: (  # noqa: E731
            small if tensor.nbytes < LARGE else starts
        )(tensor, *rest, **more)
        setattr(dist, blocking, choose)


def interrupt_when_stopped(transport, pid):
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.01)
    transport.interrupt()


def rank(number, path, name):
    """Rank 1 stops while it communicates; rank 0 is interrupted then."""
    dist.init_process_group("gloo", f"file://{path}", rank=number, world_size=2, timeout=timedelta(seconds=LIMIT))
    transport = ProcessTransport(timeout=timedelta(seconds=LIMIT))
    transport.connect([(0, 1), (1, 0)])
    communicate = CASES[name]()[number]
    pid = path.with_name("pid")
    if number == 1:
        pid.write_text(str(os.getpid()))
    transport.gather(None)
    if number == 1:
        stop_while_data_moves(transport.groups)
        communicate(transport, 0)
        os._exit(1)
    threading.Thread(target=interrupt_when_stopped, args=(transport, int(pid.read_text()))).start()
    with pytest.raises(LostRank, match="another generation"):
        communicate(transport, 1)
    transport.close_threads()
    transport.groups.leave_behind()
    dist.destroy_process_group()
    os._exit(0)  # a thread still waits


@pytest.mark.parametrize("name", CASES)
def test_a_message_that_has_moved_in_part(name, tmp_path):
    processes = [fork_server.start(rank, number, tmp_path / "store", name) for number in range(2)]
    try:
        processes[0].join(LIMIT / 2)
        assert processes[0].exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    "communicate",
    [lambda t: t.average([torch.ones(3)]), lambda t: t.maximum_async([1.0])()],
    ids=["average", "maximum"],
)
def test_a_sum_over_processes_is_not_waited_for(communicate, transport, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: SimpleNamespace(wait=lambda: gate.wait(LIMIT)))
    threading.Timer(0.1, transport.interrupt).start()
    with pytest.raises(LostRank, match="another generation"):
        communicate(transport)
    gate.set()


def test_collective_operations_in_inference_mode(transport):
    with torch.inference_mode():
        assert transport.gather({"a": 1}) == [{"a": 1}]
        assert transport.gather_to_main(0, {"x": torch.ones(2)})["x"].tolist() == [1.0, 1.0]


def test_the_thread_that_posts_ends_before_those_that_wait(transport):
    """A message whose receive is posted late is waited for, and its connection is closed."""
    posting, closed = threading.Event(), threading.Event()

    def receive(tensors, other, tag):
        if tag == UNUSED_TAG:
            closed.set()
            raise RuntimeError("Timed out")
        posting.wait(LIMIT)
        return SimpleNamespace(wait=lambda: closed.wait(LIMIT))

    group = SimpleNamespace(name=lambda: "gloo", rank=lambda: 0, size=lambda: 2, recv=receive)
    transport.groups.pairs[0, 0] = group
    transport.receive(0, ACTION, layout_of((torch.ones(5),)))
    threading.Timer(0.2, posting.set).start()
    waits = transport.groups.thread("from 0")
    transport.close_threads()
    assert closed.is_set()
    assert not waits._thread.is_alive()


def test_the_destructors_of_process_groups_keep_nobody_waiting(transport, monkeypatch):
    monkeypatch.setattr(process_groups, "DESTROY_INTERVAL", 0.01)
    gate, destroyed = threading.Event(), SimpleQueue()

    class Group:
        def __del__(self):
            gate.wait(LIMIT)
            destroyed.put(threading.current_thread().name)

    opened, transport.groups._opened = transport.groups._opened, [Group(), Group()]
    kept = transport.groups._opened[0]
    transport.groups.leave_behind()
    gate.set()
    assert destroyed.get(timeout=LIMIT) == "petra-old-groups"
    time.sleep(0.1)
    assert destroyed.empty()
    del kept
    assert destroyed.get(timeout=LIMIT) == "petra-old-groups"
    transport.groups._opened = opened


def test_after_an_error_of_a_message_others_can_be_sent(transport):
    def fails():
        raise RuntimeError("modified")

    transport._pending_sends[-1].append((0, fails))
    with pytest.raises(RuntimeError, match="modified"):
        transport.flush()
    transport._pending_sends[-1].append((0, lambda: None))
    transport.flush()


def test_threads_are_left_behind_together():
    gate = threading.Event()
    threads = [IOThread(f"waits {number}") for number in range(20)]
    for thread in threads:
        thread.submit(lambda: gate.wait(LIMIT))
    began = time.monotonic()
    close_threads(threads, 0.2)
    assert 0.2 <= time.monotonic() - began < 2
    gate.set()
    for thread in threads:
        thread.close(LIMIT)
        assert not thread._thread.is_alive()


def test_a_task_is_waited_for_in_parts():
    task = Task(lambda: 5)
    assert not task.wait(0.01)
    task.run()
    assert task.wait(0.01)
    assert task.result() == 5
