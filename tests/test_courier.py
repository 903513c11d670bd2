"""The threads that carry messages while a rank computes."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from petra.execution.courier import Courier


def alive(name):
    return any(thread.name == name for thread in threading.enumerate())


def test_errands_are_run_in_order_beside_the_one_who_gives_them():
    courier, seen, gate = Courier("a courier"), [], threading.Event()
    first = courier.give(lambda: gate.wait(10) and seen.append(threading.current_thread().name))
    rest = [courier.give(lambda i=i: seen.append(i) or i) for i in range(20)]
    assert not first.done()
    assert courier.busy
    gate.set()
    assert [future.result(10) for future in rest] == list(range(20))
    assert seen == ["a courier", *range(20)]
    courier.end(10)
    assert not courier.busy
    assert not alive("a courier")


def test_an_error_is_raised_where_the_result_is_asked_for_and_the_next_errand_is_run():
    courier = Courier("one that fails")
    failed, fine = courier.give(lambda: 1 // 0), courier.give(lambda: 5)
    with pytest.raises(ZeroDivisionError):
        failed.result(10)
    assert fine.result(10) == 5


def test_nothing_of_an_errand_is_held_while_the_next_is_waited_for():
    courier, tensor = Courier("one that lets go"), torch.zeros(3)
    watched = weakref.ref(tensor)
    future = courier.give(lambda tensor=tensor: len(tensor))
    assert future.result(10) == 3
    del tensor
    until = time.monotonic() + 10
    while watched() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert watched() is None


def test_its_thread_ends_with_it():
    courier = Courier("one that ends")
    courier.give(lambda: None).result(10)
    assert alive("one that ends")
    del courier
    gc.collect()
    until = time.monotonic() + 10
    while alive("one that ends") and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive("one that ends")


TWO_RANKS = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from petra.execution import ProcessTransport
from petra.schedule import Action, Kind

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
transport = ProcessTransport(timeout=timedelta(seconds=60))
transport.connect([(0, 1), (1, 0)])
tensor = torch.ones(5)
for number in range(2):
    arrival = transport.receive(1 - rank, Action(0, Kind.FORWARD, number), (tensor,))
    sent = tensor.clone()
    transport.send(1 - rank, Action(0, Kind.FORWARD, number), (sent,))
    assert arrival()[0].tolist() == tensor.tolist()
    transport.gather(None)  # now it has arrived everywhere
    if number == 1:
        sent.add_(1)
try:
    transport.flush()
except RuntimeError as error:
    print(error)
transport.receive(1 - rank, Action(0, Kind.FORWARD, 2), (tensor,))  # nobody will send it
transport.gather(None)
"""


def test_what_is_sent_must_stay_as_it_is_and_who_leaves_is_not_held_up(tmp_path):
    commands = [[sys.executable, "-c", TWO_RANKS, str(rank), str(tmp_path / "store")] for rank in range(2)]
    ranks = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        said = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    text = "rank {}: something was written into a tensor while it was sent to rank {}\n"
    assert said == [(text.format(0, 1), ""), (text.format(1, 0), "")]
    assert [process.returncode for process in ranks] == [0, 0]
