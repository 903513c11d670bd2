"""Ticks, trainers, trainings and jobs leave nothing behind. `python -m soak.leaks` does the same for longer."""

import os
import threading

import pytest
import torch
from soak.leak_cases import CASES
from soak.leaks import Sample, growths, main, measure

SHORT = {"ticks": 200, "ticks with corrections": 60, "states": 20, "trainers": 20}


def leaking(samples):
    return [growth.quantity for growth in growths(samples) if growth.leaks]


@pytest.mark.filterwarnings("ignore:after .* updates the training loss")
@pytest.mark.parametrize("name", SHORT)
def test_nothing_grows(name):
    with CASES[name].start(None) as work:
        for _ in range(3):
            work()
        assert not leaking(measure(work, SHORT[name], samples=20))


@pytest.mark.soak
@pytest.mark.parametrize(("name", "times"), [("ticks of two", 200), ("jobs of two", 20)])
def test_nothing_grows_on_two_ranks(name, times):
    found = CASES[name].run(times, samples=20)
    assert len(found) == 2
    assert {process: leaking(samples) for process, samples in found.items()} == {process: [] for process in found}


def keep_tensors(kept, stop):
    kept.append(torch.zeros(1))


def keep_memory(kept, stop):
    kept.append(torch.ones(200_000))


def keep_files(kept, stop):
    kept.append(os.open(os.devnull, os.O_RDONLY))


def keep_threads(kept, stop):
    thread = threading.Thread(target=stop.wait, daemon=True)
    thread.start()
    kept.append(thread)


def keep_objects(kept, stop):
    kept.append([[str(i)] for i in range(100)])


@pytest.mark.parametrize("keep", [keep_tensors, keep_memory, keep_files, keep_threads, keep_objects])
def test_leaks_are_found(keep):
    kept, stop = [], threading.Event()
    try:
        assert keep.__name__.removeprefix("keep_") in leaking(measure(lambda: keep(kept, stop), 20, samples=20))
    finally:
        stop.set()
        for thing in kept if keep is keep_files else ():
            os.close(thing)


def test_outliers_and_what_grows_at_first_are_no_leaks():
    flat = [Sample(1000.0 + 50 * min(i, 10), 10, 5, 3, 2, 0) for i in range(40)]
    assert not leaking(flat)
    flat[35] = Sample(9e6, 10**6, 500, 30, 20, 10)
    assert not leaking(flat)


def test_the_command_prints_a_table(capsys):
    assert main(["trainers", "--scale", "0.001"]) == 0
    header, _, row, end = capsys.readouterr().out.splitlines()
    assert header == "| case | times | seconds | memory | objects | tensors | files | threads | children |"
    assert row.startswith("| trainers | 40 |")
    assert end == "0 leaks"
