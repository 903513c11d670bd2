"""Whom the watchdog takes for dead, and that a process speaks once; on a board that is a dictionary."""

import json
import threading

import pytest

from petra.execution import watchdog
from petra.execution.transport import Doing
from petra.execution.watchdog import Watchdog


class Notes(dict):
    """A board that all processes of a test write on."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)

    def compare_set(self, key, expected, desired):
        return self.setdefault(key, desired.encode())


class Clock:
    """Time that passes when somebody sleeps, and then takes ``work`` along; ``now`` may jump."""

    def __init__(self, work=lambda: None):
        self.now, self.work = 0.0, work

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.work()


@pytest.fixture
def board(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)  # tests look by hand
    return Notes()


def two(board, timeout=5.0):
    left = []
    dogs = [Watchdog(board, rank, ["rank 0", "rank 1"], Doing(), timeout, left.append) for rank in range(2)]
    return *dogs, left


def look(*dogs, times=1):
    for _ in range(times):
        for dog in dogs:
            dog._look()


def test_a_silent_process_is_named_after_the_timeout(board, capsys):
    dog, other, left = two(board)
    look(dog, other, times=30)
    look(dog, times=11)
    assert left == []
    look(dog)
    assert left == [1]
    assert capsys.readouterr().err.startswith("petra: error: rank 1 is gone or stuck: last heard of in tick 0")


def test_a_process_that_is_stuck_says_so(board, capsys):
    dog, other, left = two(board)
    look(dog, other, times=30)  # setting up
    dog._doing.now("forward", 3)
    dog._doing.set_up = True
    look(dog, other, times=11)
    assert left == []
    look(dog, other)
    assert left == [1]
    assert capsys.readouterr().err == "petra: error: rank 0 is stuck in tick 3, forward, for 6 s\n"


def test_who_stood_still_blames_nobody(board, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    dog, other, left = two(board)
    dog._doing.set_up = True
    look(dog, other, times=2)
    clock.now += 100  # all of them, or this process alone: it cannot know
    look(dog, times=2)
    assert left == []


@pytest.mark.parametrize("late", [0, 2, 4])
def test_a_dead_process_is_named_however_late_its_last_word_is_read(board, late, monkeypatch):
    dog, other, _ = two(board)
    look(other)  # and dies
    sleeps = []

    def watch():
        sleeps.append(watchdog.INTERVAL / 2)
        if sum(sleeps) >= late and len(sleeps) % 2 == 0:
            dog._look()

    monkeypatch.setattr(watchdog, "time", Clock(watch))
    assert dog.explain(RuntimeError("closed")).startswith("rank 1 is gone or stuck: last heard of in tick 0")
    assert watchdog.GONE <= sum(sleeps) <= late + watchdog.GONE + 2


def test_where_all_are_alive_the_error_is_all_there_is_to_say(board, monkeypatch):
    dog, other, _ = two(board)
    clock = Clock(lambda: look(dog, other))
    monkeypatch.setattr(watchdog, "time", clock)
    assert dog.explain(RuntimeError("closed")) == "closed"
    assert clock.now == watchdog.DOUBT


def test_what_another_has_said_is_not_said_again(board, monkeypatch):
    dog, other, _ = two(board)
    assert other.claim("mine")
    monkeypatch.setattr(watchdog, "time", Clock())
    assert dog.explain(RuntimeError("closed")) is None
    assert not dog.claim("mine too")
    assert json.loads(board["failure"]) == [1, "mine"]


def test_a_process_speaks_once_and_its_watchdog_lets_it_finish(board, capsys):
    dog, _, left = two(board)
    look(dog)
    assert dog.claim("what the main thread is about to say")
    look(dog, times=20)  # the other is silent all the time
    assert left == []
    assert capsys.readouterr().err == ""
    assert not dog.claim("again")
    assert json.loads(board["failure"]) == [0, "what the main thread is about to say"]
