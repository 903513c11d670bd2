"""The threads that carry messages while a rank computes."""

import gc
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
    gate.set()
    assert [future.result(10) for future in rest] == list(range(20))
    assert seen == ["a courier", *range(20)]


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
