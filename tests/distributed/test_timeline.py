"""Traces of several ranks are complete, on one clock, and have idle times that can be checked by hand."""

import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from helpers.networks import batches, reversible_network
from helpers.trainers import make

from petra.distributed import SingleProcess, run_together
from petra.measure.timeline import ClockOffset, Event, Timeline, Trace, measure_offset
from petra.pipeline import Executor
from petra.schedule import Action, Kind, low_staleness

RANKS, TICKS = 3, 12


OFFSETS: dict[int, float] = {}
REAL = time.perf_counter


def own_clock():
    """A separate clock for each thread, with a large offset."""
    return REAL() + OFFSETS.get(threading.get_ident(), 0.0)


@pytest.fixture(scope="module", params=[0.0, 100.0])
def trace(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", own_clock)
        return record(request.param)


def record(apart):
    def work(transport):
        OFFSETS[threading.get_ident()] = apart * transport.position.rank
        torch.manual_seed(0)
        trainer = make(reversible_network(4), stages=RANKS, transport=transport)
        timeline = Timeline(trainer.executor, transport, TICKS)
        ticks = 0
        for x, y in list(batches(5)) * 3:
            trainer.step(x, y)
            ticks += 1
            if timeline.full:
                break
        assert ticks == TICKS
        return timeline.finish()

    traces = run_together(work, RANKS)
    assert traces[0] == traces[1] == traces[2]
    return traces[0]


def test_a_trace_has_every_action_of_every_rank(trace):
    schedule = low_staleness(RANKS)
    planned = [a for tick in range(TICKS) for phase in schedule.tick(tick, tick + 1) for a in phase]
    for rank in range(RANKS):
        found = [e.action for e in trace.events if e.process == rank]
        assert found == [a for a in planned if a.stage == rank]


def test_causes_come_before_effects(trace):
    when = {e.action: e for e in trace.events}
    for action, event in when.items():
        assert event.asked <= event.began <= event.ended
        step = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.UPDATE: 0}[action.kind]
        user = when.get(Action(action.stage + step, action.kind, action.microbatch))
        if step and user:
            assert event.ended <= user.began + 2 * trace.clock_error


def test_a_saved_trace_has_all_ranks(trace, tmp_path):
    trace.save(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    events = content["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}
    spans = [e for e in events if e["ph"] == "X" and e["name"] != "wait"]
    assert len(spans) == len(trace.events)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    starts = {e["id"] for e in events if e["ph"] == "s"}
    assert starts
    assert starts == {e["id"] for e in events if e["ph"] == "f"}


def test_idle_time_is_time_without_an_action():
    def event(process, tick, start, stop):
        return Event(process, tick, Action(process, Kind.FORWARD, tick), start, start, stop)

    events = [event(0, t, 10 * t, 10 * t + 9) for t in range(10)] + [
        event(1, t, 10 * t + 3, 10 * t + 8) for t in range(10)
    ]
    trace = Trace(events, ["rank 0", "rank 1"], 2, 0.0)
    first, second = trace.idle()  # from 23 to 98
    assert first == pytest.approx(1 - (7 * 9 + 5) / 75)
    assert second == pytest.approx(1 - 8 * 5 / 75)
    assert trace.table().splitlines()[-1].split() == ["rank", "1", "46.7%"]
    short = Trace(events[:1], ["rank 0", "rank 1"], 2, 0.0)
    assert short.idle() == []
    assert "too short" in short.table()


def test_clock_offsets_are_measured(monkeypatch):
    """Each thread has its own clock; the measured offset is correct within its error."""
    monkeypatch.setattr(time, "perf_counter", own_clock)

    def work(transport):
        OFFSETS[threading.get_ident()] = 100.0 * transport.position.rank
        return measure_offset(transport)

    for rank, found in enumerate(run_together(work, RANKS)):
        assert abs(found.offset - 100.0 * rank) <= found.error + 1e-9
        assert found.error < 0.5


def test_clock_drift_is_corrected(monkeypatch):
    clocks = iter([ClockOffset(10.0, 0.0, when=100.0), ClockOffset(12.0, 0.0, when=200.0)])
    monkeypatch.setattr("petra.measure.timeline.measure_offset", lambda transport: next(clocks))
    executor = Executor([], low_staleness(1))
    timeline = Timeline(executor, SingleProcess(), 1)
    executor.clock(0, Action(0, Kind.FORWARD, 0), 100.0, 150.0, 200.0)
    (event,) = timeline.finish().events
    assert (event.asked, event.began, event.ended) == (90.0, 139.0, 188.0)


def test_a_trace_waits_for_the_gpu_of_the_stage(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    settings = SimpleNamespace(device=torch.device("cuda", 1))
    stage = SimpleNamespace(index=0, layers=SimpleNamespace(settings=settings))
    executor = Executor([stage], low_staleness(1))
    executor._now()
    assert waited == []
    executor.clock = print
    executor._now()
    assert waited == [torch.device("cuda", 1)]
