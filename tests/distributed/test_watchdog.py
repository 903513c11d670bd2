"""Which process the watchdog reports as lost, and that a job reports once. The store is a dictionary."""

import json
import threading
from queue import SimpleQueue

import pytest

from petra.distributed import watchdog
from petra.distributed.membership import Membership, Roster, publish
from petra.distributed.watchdog import Generation, Watchdog
from petra.pipeline import Activity


class DictStore(dict):
    """A store that all watchdogs of a test share."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)

    def compare_set(self, key, expected, desired):
        return self.setdefault(key, desired.encode())


class Clock:
    """A clock that only advances in `sleep`, which also calls ``work``."""

    def __init__(self, work=lambda: None):
        self.now, self.work = 0.0, work

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.work()


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)  # tests poll by hand
    return DictStore()


def two_watchdogs(store, timeout=5.0):
    exits = []
    dogs = [Watchdog(store, rank, ["rank 0", "rank 1"], Activity(), timeout, exits.append) for rank in range(2)]
    return *dogs, exits


def poll(*dogs, times=1):
    for _ in range(times):
        for dog in dogs:
            dog._poll()


def test_a_silent_process_is_reported_after_the_timeout(store, capsys):
    dog, other, exits = two_watchdogs(store)
    poll(dog, other, times=30)
    poll(dog, times=11)
    assert exits == []
    poll(dog)
    assert exits == [1]
    assert capsys.readouterr().err.startswith("petra: error: rank 1 is gone or stuck: last heard from in tick 0")


def test_processes_that_wait_for_each_other_end_the_job(store, capsys):
    dog, other, exits = two_watchdogs(store)
    for one, rank in ((dog, 1), (other, 0)):
        one._activity.now("forward", 3)
        one._activity.set_up = True
        one._activity.waiting(rank).__enter__()
    poll(dog, other, times=11)
    assert exits == []
    poll(dog, other, times=2)
    assert exits[0] == 1
    assert capsys.readouterr().err.endswith("in tick 3, forward, waiting for rank 0: a message was lost\n")


def test_a_process_that_computes_while_the_others_wait_is_no_deadlock(store):
    dog, other, exits = two_watchdogs(store, timeout=100.0)
    other._activity.now("evaluating")
    dog._activity.waiting(1).__enter__()
    dog._timeout = 5.0
    poll(dog, other, times=30)
    assert exits == []


class Reports:
    """Stands for a membership, and keeps what is reported to the launcher."""

    generation = 0

    def __init__(self):
        self.lost, self.suspects = [], []

    def report_lost(self, roster, process, reason):
        self.lost.append(process)

    def report_suspects(self, roster, processes):
        self.suspects.append(processes)


def watched(store, timeout):
    reports, activity = Reports(), Activity()
    generation = Generation(reports, Roster(0, (0, 1)), lambda: None, lambda: False)
    dogs = [Watchdog(store, rank, ["a", "b"], activity, timeout, generation=generation) for rank in range(2)]
    return *dogs, reports


def test_a_process_that_is_silent_while_it_waits_is_lost_and_not_the_one_that_waits_for_it(store):
    dog, other, reports = watched(store, 5.0)
    for one, rank in ((dog, 1), (other, 0)):
        one._activity.now("forward", 3)
        one._activity.set_up = True
        one._activity.waiting(rank).__enter__()
    poll(dog, other, times=2)
    poll(dog, times=40)
    assert set(reports.lost) == {1}


def test_the_launcher_knows_a_suspect_long_before_the_timeout(store):
    dog, other, reports = watched(store, 2.0)
    poll(dog, other, times=20)
    poll(dog, times=6)  # of 0.1 s each, the first of which finds a new status
    assert reports.suspects == []
    poll(dog, times=14)
    assert reports.suspects == [[1]] * 14
    assert reports.lost == []
    poll(dog, times=2)
    assert reports.lost == [1]
    poll(other, dog)
    assert len(reports.suspects) == 16


def test_a_process_that_is_stuck_reports_itself(store, capsys):
    dog, other, exits = two_watchdogs(store)
    poll(dog, other, times=30)  # setting up
    dog._activity.now("forward", 3)
    dog._activity.set_up = True
    poll(dog, other, times=11)
    assert exits == []
    poll(dog, other)
    assert exits == [1]
    assert capsys.readouterr().err == "petra: error: rank 0 is stuck in tick 3, forward, for 6 s\n"


def test_a_suspended_process_blames_nobody(store, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    dog, other, exits = two_watchdogs(store)
    dog._activity.set_up = True
    poll(dog, other, times=2)
    clock.now += 100  # the process cannot know whether the others were suspended, too
    poll(dog, times=2)
    assert exits == []


@pytest.mark.parametrize("late", [0, 2, 4])
def test_a_dead_process_is_reported_however_late_its_last_status_is_read(store, late, monkeypatch):
    dog, other, _ = two_watchdogs(store)
    poll(other)  # before it dies
    sleeps = []

    def watch():
        sleeps.append(watchdog.INTERVAL / 2)
        if sum(sleeps) >= late and len(sleeps) % 2 == 0:
            dog._poll()

    monkeypatch.setattr(watchdog, "time", Clock(watch))
    assert dog.diagnose(RuntimeError("closed")).startswith("rank 1 is gone or stuck: last heard from in tick 0")
    assert watchdog.SILENCE_LIMIT <= sum(sleeps) <= late + watchdog.SILENCE_LIMIT + 2


def test_if_all_processes_are_alive_the_diagnosis_is_the_error(store, monkeypatch):
    dog, other, _ = two_watchdogs(store)
    clock = Clock(lambda: poll(dog, other))
    monkeypatch.setattr(watchdog, "time", clock)
    assert dog.diagnose(RuntimeError("closed")) == "closed"
    assert clock.now == watchdog.DIAGNOSIS_TIMEOUT


def test_a_failure_is_not_reported_twice(store, monkeypatch):
    dog, other, _ = two_watchdogs(store)
    assert other.report_failure("first")
    monkeypatch.setattr(watchdog, "time", Clock())
    assert dog.diagnose(RuntimeError("closed")) is None
    assert not dog.report_failure("second")
    assert json.loads(store["failure"]) == [1, "first"]


def test_a_process_reports_once_and_its_watchdog_lets_it_finish(store, capsys):
    dog, _, exits = two_watchdogs(store)
    poll(dog)
    assert dog.report_failure("printed by the main thread")
    poll(dog, times=20)  # the other process is silent all the time
    assert exits == []
    assert capsys.readouterr().err == ""
    assert not dog.report_failure("again")
    assert json.loads(store["failure"]) == [0, "printed by the main thread"]


class Lost(DictStore):
    """A store whose connection is lost."""

    def get(self, *_):
        raise RuntimeError("Broken pipe")

    set = check = compare_set = get


def test_a_process_that_has_lost_its_connections_asks_for_new_ones():
    """The launcher still answers on its own connection, and begins a generation."""
    store, interrupted, exits = DictStore(), threading.Event(), []
    roster = Roster(0, (0, 1))
    publish(store, roster)
    member = Membership(store, 0)
    member.ask_for_another = lambda given: publish(store, Roster(1, given.members))
    dog = Watchdog(
        DictStore(),
        0,
        ["rank 0", "rank 1"],
        Activity(),
        60.0,
        exits.append,
        Generation(member, roster, interrupted.set, lambda: False),
    )
    dog._store = Lost()
    assert interrupted.wait(10.0)
    assert exits == []
    dog.close()


@pytest.mark.parametrize(("connecting", "seconds"), [(False, 2), (True, 1)])
def test_a_process_that_does_not_leave_a_generation_is_replaced(connecting, seconds, monkeypatch):
    monkeypatch.setattr(watchdog, "CONNECT_PATIENCE", 0.8)
    store, replaced, interrupted = DictStore(), SimpleQueue(), threading.Event()
    publish(store, Roster(0, (0, 1)))
    member = Membership(store, 0)
    member.replace_this_process = replaced.put
    generation = Generation(member, Roster(0, (0, 1)), interrupted.set, lambda: connecting)
    dog = Watchdog(DictStore(), 0, ["rank 0", "rank 1"], Activity(), 2.0, print, generation)
    publish(store, Roster(1, (0, 2)))
    assert interrupted.wait(10.0)
    reason = replaced.get(timeout=10.0)
    assert f"rank 0 is replaced: it has not reacted to the loss of a process for {seconds} s. " in reason
    assert "test_a_process_that_does_not_leave_a_generation_is_replaced" in reason  # what the main thread does
    dog.close()


class StoppedStore(DictStore):
    """A store that stops to answer: a call never returns."""

    stopped = threading.Event()

    def check(self, keys):
        self.stopped.wait(30)
        return super().check(keys)


@pytest.mark.parametrize(("process", "recovers", "says"), [(0, True, True), (1, True, False), (1, False, True)])
def test_a_stopped_launcher_is_reported_once(process, recovers, says, monkeypatch, capsys):
    """Without recovery, every process says so: each may be on a machine of its own."""
    monkeypatch.setattr(watchdog, "INTERVAL", 0.02)
    monkeypatch.setattr(watchdog, "STORE_LIMIT", 0.1)
    exits, roster, StoppedStore.stopped = SimpleQueue(), Roster(0, (0, 1)), threading.Event()
    launcher = DictStore()
    publish(launcher, roster)
    generation = Generation(Membership(launcher, process), roster, lambda: None, lambda: False) if recovers else None
    StoppedStore.stopped.set()
    dog = Watchdog(StoppedStore(), process, ["rank 0", "rank 1"], Activity(), 0.1, exits.put, generation)
    StoppedStore.stopped.clear()
    assert exits.get(timeout=10.0) == 1
    assert ("the store of the job has not answered" in capsys.readouterr().err) == says
    StoppedStore.stopped.set()
    dog.close()


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_has_lost_the_launcher_ends_and_the_first_one_says_why(process, monkeypatch, capsys):
    monkeypatch.setattr(watchdog, "SILENCE_LIMIT", 0.01)
    exits, roster = [], Roster(0, (0, 1))
    lost = Generation(Membership(Lost(), process), roster, lambda: None, lambda: False)
    dog = Watchdog(DictStore(), process, ["rank 0", "rank 1"], Activity(), 60.0, exits.append, lost)
    dog._store = Lost()
    dog._thread.join(10.0)
    assert exits == [1]
    reason = "petra: error: the store of the job is gone, and with it the process that holds it"
    assert (reason in capsys.readouterr().err) == (process == 0)
    dog.close()
