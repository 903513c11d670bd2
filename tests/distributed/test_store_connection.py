"""The connection to the store of a job is made again when it is lost."""

from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from petra.distributed.store_connection import RECONNECT_LIMIT, StoreConnection

LIMIT = timedelta(seconds=30)


class Connections:
    """Connects to a store; the last connection can be lost."""

    def __init__(self):
        self.entries, self.limits, self.refuses, self.refused = {}, [], False, 0

    def __call__(self, limit):
        if self.refuses:
            self.refused += 1
            raise RuntimeError("connection refused")
        self.limits.append(limit)
        self.last = Connection(self.entries)
        return self.last


class Connection:
    def __init__(self, entries):
        self.entries, self.lost = entries, False

    def set(self, key, value):
        self._check()
        self.entries[key] = value.encode()

    def get(self, key):
        self._check()
        return self.entries[key]

    def check(self, keys):
        self._check()
        return all(key in self.entries for key in keys)

    def _check(self):
        if self.lost:
            raise RuntimeError("Broken pipe")


def test_every_call_connects_again():
    connect = Connections()
    store = StoreConnection(connect, LIMIT)
    connect.last.lost = True
    store.set("a", "1")
    connect.last.lost = True
    assert store.get("a") == b"1"
    connect.last.lost = True
    assert store.check(["a"])
    assert not store.check(["b"])
    assert connect.limits == [LIMIT] + [RECONNECT_LIMIT] * 3


def test_threads_that_lose_a_connection_together_connect_once():
    connect = Connections()
    store = StoreConnection(connect, LIMIT)
    lost = connect.last

    def fail_after_another_thread(key):
        lost.lost = True
        store.set("a", "1")
        raise RuntimeError("Broken pipe")

    lost.get = fail_after_another_thread
    assert store.get("a") == b"1"
    assert connect.limits == [LIMIT, RECONNECT_LIMIT]


def test_a_store_that_is_gone_is_tried_once():
    connect = Connections()
    store = StoreConnection(connect, LIMIT)
    connect.last.lost = connect.refuses = True
    for reason in ("connection refused", "Broken pipe", "Broken pipe"):
        with pytest.raises(RuntimeError, match=reason):
            store.get("a")
    assert connect.refused == 1


def test_a_real_store():
    main = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = []

    def connect(limit):
        made.append(TCPStore("127.0.0.1", main.port, is_master=False, timeout=limit))
        return made[-1]

    store = StoreConnection(connect, LIMIT)
    store.set("a", "1")
    assert main.get("a") == store.get("a") == b"1"
    assert len(made) == 1
