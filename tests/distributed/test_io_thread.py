"""I/O threads send and receive messages while a rank computes."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from petra.distributed import LostRank
from petra.distributed.io_thread import IOThread, Task
from petra.pipeline.message_layout import layout_of
from petra.schedule import Action, Kind

pytestmark = pytest.mark.slow


def alive(name):
    return any(thread.name == name for thread in threading.enumerate())


def test_tasks_run_in_order_and_concurrently_with_the_caller():
    thread, seen, gate = IOThread("in order"), [], threading.Event()
    first = thread.submit(lambda: gate.wait(10) and seen.append(threading.current_thread().name))
    rest = [thread.submit(lambda i=i: seen.append(i) or i) for i in range(20)]
    assert not first.done()
    assert thread.busy
    gate.set()
    assert [future.result(10) for future in rest] == list(range(20))
    assert seen == ["in order", *range(20)]
    thread.close(10)
    assert not thread.busy
    assert not alive("in order")


def test_an_error_is_raised_by_its_future_and_the_next_task_runs():
    thread = IOThread("fails")
    failed, fine = thread.submit(lambda: 1 // 0), thread.submit(lambda: 5)
    with pytest.raises(ZeroDivisionError):
        failed.result(10)
    assert fine.result(10) == 5


def test_a_finished_task_is_released_while_the_thread_waits_for_the_next():
    thread, tensor = IOThread("releases"), torch.zeros(3)
    watched = weakref.ref(tensor)
    future = thread.submit(lambda tensor=tensor: len(tensor))
    assert future.result(10) == 3
    del tensor
    until = time.monotonic() + 10
    while watched() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert watched() is None


def test_the_thread_ends_when_its_owner_is_collected():
    thread = IOThread("ends")
    thread.submit(lambda: None).result(10)
    assert alive("ends")
    del thread
    gc.collect()
    until = time.monotonic() + 10
    while alive("ends") and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive("ends")


def group_with(**operations):
    """Return a stand-in for a process group, with the transport's own process as its only member."""
    return SimpleNamespace(name=lambda: "gloo", rank=lambda: 0, size=lambda: 1, **operations)


def test_receives_are_posted_while_earlier_ones_wait(transport, monkeypatch):
    posted, arrived = SimpleQueue(), threading.Event()
    work = SimpleNamespace(wait=lambda: arrived.wait(60))
    transport.groups.pairs[0, 0] = group_with(recv=lambda tensors, *_: (posted.put(tensors), work)[1])
    for number in range(3):
        transport.receive(0, Action(0, Kind.FORWARD, number), layout_of((torch.ones(5),)))
    try:
        for _ in range(3):
            posted.get(timeout=30)
    finally:
        arrived.set()


def test_the_memory_of_a_message_is_used_again_when_it_has_left(transport):
    sent, may_leave = SimpleQueue(), threading.Event()
    work = SimpleNamespace(wait=lambda: may_leave.wait(60))
    transport.groups.pairs[0, 0] = group_with(send=lambda tensors, *_: (sent.put(tensors[0]), work)[1])
    message = layout_of((torch.ones(5),)).pack((torch.ones(5),))

    def send():
        transport.begin_tick()
        transport.send_packed(0, Action(0, Kind.FORWARD, 0), message)
        message.memory.add_(1)  # the next launch of the graph
        return sent.get(timeout=30)

    first, second = send(), send()
    assert first.data_ptr() != second.data_ptr()
    assert not message.layout.views(first)[0].equal(message.layout.views(second)[0])
    may_leave.set()
    assert send().data_ptr() in (first.data_ptr(), second.data_ptr())
    assert transport.sent[0, "F"] == 3 * 20
    transport.flush()
    transport.release_buffers()


def test_a_task_can_get_its_function_later_or_fail():
    thread, task = IOThread("later"), Task()
    assert not task.done()
    with pytest.raises(TimeoutError):
        task.result(0.01)
    task.begin_with(lambda: 7)
    thread.queue(task)
    assert (task.result(10), task.result(), task.exception(), task.done()) == (7, 7, None, True)
    failed, error = Task(), ValueError("no")
    failed.fail(error)
    assert failed.done()
    assert failed.exception() is error
    with pytest.raises(ValueError, match="no"):
        failed.result()
    thread.close(10)


def test_an_error_while_a_receive_is_posted_is_raised_when_it_is_waited_for(transport):
    def fails(*_):
        raise RuntimeError("the connection is closed")

    transport.groups.pairs[0, 0] = group_with(recv=fails)
    arrival = transport.receive(0, Action(0, Kind.FORWARD, 0), layout_of((torch.ones(5),)))
    with pytest.raises(LostRank, match=r"cannot receive from rank 0 \(the connection is closed\)"):
        arrival()


@pytest.mark.parametrize(("ticks", "waited_for"), [(1, [0, 1, 2, 3]), (2, [0, 1, 2]), (3, [0, 1])])
def test_as_many_ticks_may_send_as_messages_need(transport, ticks, waited_for):
    transport.max_unsent_ticks, waited = ticks, []
    transport.groups.wait_for = lambda task: waited.append(task.result())
    for tick in range(5):
        transport.begin_tick()
        transport._pending_sends[-1].append((0, lambda tick=tick: tick))
    assert waited == waited_for
    transport.flush()
    assert waited == [0, 1, 2, 3, 4]


TWO_RANKS = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from petra.distributed import ProcessTransport
from petra.pipeline.message_layout import layout_of
from petra.schedule import Action, Kind

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
transport = ProcessTransport(timeout=timedelta(seconds=60))
transport.connect([(0, 1), (1, 0)])
tensor = torch.ones(2**19)  # sent from where it is; a smaller one is copied first
for number in range(2):
    arrival = transport.receive(1 - rank, Action(0, Kind.FORWARD, number), layout_of((tensor,)))
    sent = tensor.clone()
    transport.send(1 - rank, Action(0, Kind.FORWARD, number), (sent,))
    assert arrival()[0].equal(tensor)
    transport.gather(None)  # now it has arrived on both ranks
    if number == 1:
        sent.add_(1)
try:
    transport.flush()
except RuntimeError as error:
    print(error)
transport.receive(1 - rank, Action(0, Kind.FORWARD, 2), layout_of((tensor,)))  # nobody will send it
transport.gather(None)
"""


def test_a_write_into_a_tensor_that_is_being_sent_is_detected_and_a_pending_receive_does_not_delay_exit(tmp_path):
    commands = [[sys.executable, "-c", TWO_RANKS, str(rank), str(tmp_path / "store")] for rank in range(2)]
    ranks = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        printed = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    text = (
        "rank {}: a tensor was modified while it was being sent to rank {}: "
        "layers must not write into their inputs or outputs\n"
    )
    assert printed == [(text.format(0, 1), ""), (text.format(1, 0), "")]
    assert [process.returncode for process in ranks] == [0, 0]
