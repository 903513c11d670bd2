"""The simulation of pipelines: closed forms, monotony, and equality with a plain simulation."""

from dataclasses import replace
from itertools import pairwise
from math import ceil

import numpy as np
import pytest
from helpers.simulation_reference import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from petra.measure import PipelineOverLinks, Seconds, tick_seconds
from petra.schedule import (
    AsyncSchedule,
    InterleavedSchedule,
    find_schedule,
    least_in_flight,
    lock_step,
    low_staleness,
)
from petra.simulation import Cluster, Cycle, LinkSpeed, Operation, StageCosts, Trace, draw_timeline, simulate, zbv
from petra.simulation.state import State

SMALL = settings(max_examples=12, deadline=None)
NAMES = ("low-staleness", "lock-step", "1f1b", "gpipe", "flush:2", "sequential", "locked-forward", "decoupled")
SECONDS = {"F": "forward", "B": "backward", "U": "update", "L": "learn", "W": "weight"}

seconds = st.integers(0, 9).map(float)
costs = st.builds(
    StageCosts, forward=seconds, backward=seconds, update=seconds, forward_bytes=seconds, backward_bytes=seconds
)
clusters = st.builds(
    Cluster,
    link=st.builds(LinkSpeed, latency=seconds, bandwidth=st.integers(1, 4).map(float)),
    network=st.none() | st.builds(LinkSpeed, latency=seconds, bandwidth=st.integers(1, 4).map(float)),
    node_size=st.none() | st.integers(1, 3),
    overlap=st.booleans(),
    overhead=st.integers(0, 2).map(float),
)


def uniform(stages, **more):
    return [StageCosts(forward=1.0, backward=2.0, **more)] * stages


@st.composite
def cycles(draw):
    """Cycles of all schedules, some of them with several stages per worker."""
    stages, accumulate = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    name = draw(st.sampled_from((*NAMES, "interleaved", "zbv")))
    if name == "zbv":
        return zbv(stages, accumulate)
    if name == "interleaved":
        return Cycle.of(InterleavedSchedule(2 * stages, accumulate))
    placement = list(range(stages))
    if draw(st.booleans()):
        placement = sorted(s % draw(st.integers(1, stages)) for s in range(stages))
        placement = [sorted(set(placement)).index(worker) for worker in placement]
    return Cycle.of(find_schedule(name, stages, accumulate), placement)


@SMALL
@given(cycles(), st.data(), clusters)
def test_all_times_equal_those_of_a_plain_simulation(cycle, data, cluster):
    stages = data.draw(st.lists(costs, min_size=cycle.stages, max_size=cycle.stages))
    if cycle.name == "zbv":  # the plain simulation knows no parts of a backward
        stages = [replace(c, backward=c.backward + 3, weight=3.0) for c in stages]
    plain = [replace(c, backward=c.backward - c.weight) for c in stages]
    repeats, programs = 3, [[] for _ in range(cycle.workers)]
    for number in range(repeats):
        for worker, (stage, kind, m) in cycle.operations:
            programs[worker].append((stage, kind, m + number * cycle.microbatches))
    expected = reference(programs, cycle.placement, plain, cluster, SECONDS)
    state, trace = State(cycle, stages, cluster, 1, 1, 0), Trace(cycle, stages)
    for number in range(repeats):
        state.run(number, trace)
    found = {(e.stage, e.kind, e.microbatch): (e.start, e.end) for e in trace.events()}
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(expected[key]) for key in expected)


@given(st.integers(1, 12), st.integers(1, 24), st.sampled_from(["1f1b", "gpipe"]))
@SMALL
def test_a_flushed_pipeline_has_the_known_bubble(stages, accumulate, name):
    found = simulate(Cycle.of(find_schedule(name, stages, accumulate)), uniform(stages))
    assert found.seconds_per_update == pytest.approx(3 * (accumulate + stages - 1))
    assert found.bubble == pytest.approx((stages - 1) / (accumulate + stages - 1))


@given(st.integers(1, 12), st.integers(1, 8), st.sampled_from([lock_step, low_staleness]))
@SMALL
def test_petra_has_no_bubble(stages, accumulate, schedule):
    found = simulate(Cycle.of(schedule(stages, accumulate)), uniform(stages))
    assert found.seconds_per_update == pytest.approx(3 * accumulate)
    assert found.bubble == pytest.approx(0, abs=1e-9)


@given(st.integers(2, 8), st.integers(1, 4))
@SMALL
def test_interleaving_divides_the_bubble_by_the_stages_per_worker(workers, groups):
    schedule = InterleavedSchedule(2 * workers, groups * workers)
    found = simulate(Cycle.of(schedule), uniform(2 * workers))
    assert found.seconds_per_update == pytest.approx(3 * (2 * groups * workers + workers - 1))


@given(st.integers(1, 8), st.integers(0, 8))
@SMALL
def test_zbv_has_no_bubble_if_all_three_parts_take_the_same_time(workers, more):
    found = simulate(zbv(workers, 2 * workers - 1 + more), uniform(2 * workers, weight=1.0))
    assert found.bubble == pytest.approx(0, abs=1e-9)


@given(st.integers(1, 8), st.floats(0, 2))
@SMALL
def test_enough_micro_batches_in_flight_hide_the_latency(stages, latency):
    # Neighbours whose numbers in flight differ by d pass d + 1 micro-batches around in 2T + 2c.
    apart = ceil(1 + 2 * latency - 1e-9)
    cycle = Cycle.of(AsyncSchedule([apart * (stages - 1 - s) for s in range(stages)], 4))
    found = simulate(cycle, uniform(stages), Cluster(LinkSpeed(latency=3 * latency)))
    assert found.seconds_per_update == pytest.approx(12)


@given(st.integers(2, 4), st.integers(1, 2), st.integers(0, 20))
@SMALL
def test_latency_stalls_a_pipeline_with_too_few_in_flight(stages, apart, latency):
    schedule = AsyncSchedule([apart * (stages - 1 - s) for s in range(stages)])
    found = simulate(Cycle.of(schedule), uniform(stages), Cluster(LinkSpeed(latency=float(latency))))
    # The way across q boundaries and back, for the micro-batches that are under way.
    rounds = [(3 * (q + 1) + 2 * q * latency) / (q * apart + 1) for q in range(stages)]
    assert found.seconds_per_update == pytest.approx(max(rounds))


@SMALL
@given(cycles(), st.data(), clusters, st.floats(1, 4))
def test_a_slower_link_is_never_faster(cycle, data, cluster, factor):
    stages = data.draw(st.lists(costs, min_size=cycle.stages, max_size=cycle.stages))
    link = cluster.link
    slower = replace(cluster, link=LinkSpeed(link.latency * factor + factor - 1, link.bandwidth / factor))
    fast, slow = (State(cycle, stages, speed, 1, 1, 0) for speed in (cluster, slower))
    for number in range(4):
        fast.run(number, None)
        slow.run(number, None)
        assert (slow.clock >= fast.clock - 1e-9).all()


@SMALL
@given(cycles(), st.data(), clusters)
def test_work_is_conserved(cycle, data, cluster):
    stages = data.draw(st.lists(costs, min_size=cycle.stages, max_size=cycle.stages))
    cluster = replace(cluster, overhead=0.0)
    found = simulate(cycle, stages, cluster)
    k = found.microbatches_per_update
    work = np.zeros(cycle.workers)
    for stage, c in enumerate(stages):
        learns = c.learn if "L" in cycle.kinds and stage < cycle.stages - 1 else 0.0
        work[cycle.placement[stage]] += k * (c.forward + c.backward + learns) + c.update
    assert found.busy * found.seconds_per_update == pytest.approx(work)
    assert found.seconds_per_update >= work.max() - 1e-6
    assert (found.idle >= -1e-9).all()


@SMALL
@given(st.integers(1, 4), st.integers(1, 3), st.lists(seconds, min_size=8, max_size=8), seconds)
def test_ticks_equal_those_of_the_planner(stages, accumulate, times, latency):
    schedule = low_staleness(stages, accumulate)
    own = [StageCosts(forward=times[2 * s], backward=1 + times[2 * s + 1]) for s in range(stages)]
    found = simulate(Cycle.of(schedule), own, Cluster(LinkSpeed(latency)))
    messages = [latency] * (stages - 1)
    expected = tick_seconds(schedule, range(stages), [Seconds(c.forward, c.backward) for c in own], messages, messages)
    assert found.seconds_per_update / accumulate == pytest.approx(expected, rel=0.02)


def per_microbatch(in_flight, stages, latency, placement=None, bandwidth=float("inf")):
    schedule = AsyncSchedule(in_flight)
    found = simulate(Cycle.of(schedule, placement), stages, Cluster(LinkSpeed(latency, bandwidth)), updates=40)
    return found.seconds_per_update


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(0, 12))
def test_low_staleness_hides_messages_and_one_fewer_in_flight_does_not(stages, twelfths):
    latency = twelfths / 12
    least = low_staleness(stages, latency=latency).in_flight
    work = [StageCosts(forward=4.0, backward=8.0)] * stages
    assert per_microbatch(least, work, 12 * latency) == pytest.approx(12)
    for stage in range(stages - 1):
        fewer = [n - (s == stage) for s, n in enumerate(least)]
        if all(above > below for above, below in pairwise(fewer)):
            assert per_microbatch(fewer, work, 12 * latency) > 12.1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=5), st.data(), st.integers(0, 9))
def test_least_in_flight_keeps_the_slowest_stage_busy_and_no_smaller_numbers_do(times, data, latency):
    stages = [StageCosts(forward=float(f), backward=float(b)) for f, b in times]
    own = [c.forward + c.backward for c in stages]
    period = max(own) + data.draw(st.sampled_from([0.0, 0.5, 4.0]))
    least = least_in_flight(own, [2.0 * latency] * (len(own) - 1), period)
    assert per_microbatch(least, stages, latency) <= period * (1 + 1e-6)
    for stage in range(len(own) - 1):
        fewer = [n - (s <= stage) for s, n in enumerate(least)]  # the differences above stay
        if fewer[stage] > fewer[stage + 1]:
            assert per_microbatch(fewer, stages, latency) > period * (1 + 1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.data())
def test_slow_pipelines_have_the_period_of_the_simulation(ranks, data):
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=ranks, max_size=ranks))
    placement = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    seconds = data.draw(st.lists(st.integers(1, 6).map(float), min_size=len(placement), max_size=len(placement)))
    up, down = ([float(data.draw(st.integers(0, 40))) for _ in placement[1:]] for _ in range(2))
    latency, bandwidth = data.draw(st.integers(0, 9)), data.draw(st.sampled_from([3.0, 10.0, float("inf")]))
    pipeline = PipelineOverLinks(seconds, placement, up, down, latency, bandwidth)
    stages = [
        StageCosts(forward=s / 3, backward=2 * s / 3, forward_bytes=f, backward_bytes=b)
        for s, f, b in zip(seconds, [*up, 0.0], [0.0, *down], strict=True)
    ]
    adapted = pipeline.least_in_flight(keep := data.draw(st.sampled_from([1.0, 0.95, 0.5])))
    found = per_microbatch(adapted, stages, latency, placement, bandwidth)
    assert pipeline.limit * (1 - 1e-6) <= found <= pipeline.period(adapted) * (1 + 1e-6)
    assert pipeline.period(adapted) <= pipeline.limit / keep * (1 + 1e-6)
    if len(placement) == ranks:
        more = data.draw(st.integers(0, 2))
        spread = [n + more * s for n, s in zip(adapted, reversed(range(ranks)), strict=True)]
        # The announcements of receives, of which the simulation knows nothing, may only make it slower.
        assert per_microbatch(spread, stages, latency, placement, bandwidth) <= pipeline.period(spread) * (1 + 1e-6)
        free = replace(pipeline, latency=0.0, up_bytes=[0.0] * len(up), down_bytes=[0.0] * len(down))
        assert per_microbatch(spread, stages, 0.0, placement) == pytest.approx(free.period(spread))


def test_receives_are_announced_where_a_tick_begins():
    pipeline = PipelineOverLinks([2.0, 2.0], [0, 1], [0.0], [0.0], latency=5.0)
    # Two latencies pass from the announcement to the arrival, in n / 2 + 1 ticks without the work.
    assert [pipeline.period([n, 0]) for n in (1, 2, 3, 4, 10)] == [12, 6, 6, 4, 2]
    assert pipeline.least_in_flight(keep=1.0) == [10, 0]
    assert least_in_flight([2.0, 2.0], [10.0], 2.0) == [6, 0]  # a transport that announces nothing


def test_a_worker_that_sends_without_overlap_computes_later():
    costs = uniform(3, forward_bytes=1.0, backward_bytes=2.0)
    cycle = Cycle.of(low_staleness(3, 2, latency=4.0))
    overlap, blocking = (
        simulate(cycle, costs, Cluster(LinkSpeed(bandwidth=1.0), overlap=overlap)) for overlap in (True, False)
    )
    assert overlap.seconds_per_update == pytest.approx(6)
    assert blocking.seconds_per_update == pytest.approx(2 * (3 + 1 + 2))  # the stage in the middle sends both ways


def test_a_bandwidth_below_the_need_is_the_limit():
    costs = uniform(4, forward_bytes=10.0, backward_bytes=20.0)
    found = simulate(Cycle.of(lock_step(4, 4)), costs, Cluster(LinkSpeed(bandwidth=2.0)))
    assert found.seconds_per_update == pytest.approx(4 * 10)


def test_nodes_have_a_slower_network_between_them():
    cluster = Cluster(LinkSpeed(1.0, 2.0), LinkSpeed(3.0, 4.0), node_size=2)
    assert cluster.between(0, 1) == cluster.link
    assert cluster.between(2, 1) == cluster.network


def test_replicas_wait_for_each_other_and_average_their_gradients():
    costs = uniform(2, gradient_bytes=8.0)
    cluster = Cluster(LinkSpeed(bandwidth=4.0))
    found = simulate(Cycle.of(low_staleness(2, 4)), costs, cluster, replicas=4)
    assert found.seconds_per_update == pytest.approx(12 + 2 * 3 / 4 * 8 / 4)
    assert found.microbatches_per_second == pytest.approx(16 / 15)
    assert found.averaging == pytest.approx(3 / 15)


def test_the_slowest_replica_delays_all_others():
    cycle = Cycle.of(low_staleness(2, 4))
    cluster = Cluster(stragglers=0.25, slowdown=2.0)
    found = simulate(cycle, uniform(2), cluster, replicas=20)
    assert found.seconds_per_update == pytest.approx(24, rel=0.01)
    assert 0.3 < found.bubble < 0.5  # three quarters of the workers wait for half of the time
    alone = simulate(cycle, uniform(2), replace(cluster, slowdown=1.0), replicas=20)
    assert alone.seconds_per_update == pytest.approx(12)


def test_no_replica_begins_before_all_have_made_their_update():
    state = State(Cycle.of(lock_step(1, 2)), uniform(1), Cluster(jitter=0.2), 5, 5, 0)
    state.run(0, None)
    assert np.ptp(state.clock) == 0
    alone = State(Cycle.of(lock_step(1, 2)), uniform(1), Cluster(jitter=0.2), 5, 1, 0)
    alone.run(0, None)
    assert np.ptp(alone.clock) > 0


def test_jitter_has_the_given_spread_and_costs_time():
    cycle = Cycle.of(low_staleness(8, 4))
    still, some, much = (
        simulate(cycle, uniform(8), Cluster(jitter=jitter), updates=100, seed=3) for jitter in (0.0, 0.1, 0.5)
    )
    assert still.seconds_per_update < some.seconds_per_update < much.seconds_per_update
    assert much.busy * much.seconds_per_update == pytest.approx(12, rel=0.1)  # the mean of durations is as given
    again = simulate(cycle, uniform(8), Cluster(jitter=0.1), updates=100, seed=3)
    assert again.seconds_per_update == some.seconds_per_update
    events = some.trace.events()
    forwards = [e.end - e.start for e in events if e.kind == "F"]
    assert 0.05 < np.std(forwards) < 0.15


def test_memory_follows_what_is_in_flight():
    costs = uniform(4, resident_bytes=100.0, saved_bytes=10.0, working_bytes=1.0)
    peaks = {
        name: simulate(Cycle.of(find_schedule(name, 4, 6)), costs).peak_memory.tolist()
        for name in ("gpipe", "1f1b", "low-staleness", "lock-step", "sequential")
    }
    assert peaks["gpipe"] == [161.0] * 4
    assert peaks["1f1b"] == [141.0, 131.0, 121.0, 111.0]
    assert peaks["low-staleness"] == [141.0, 131.0, 121.0, 111.0]
    assert peaks["lock-step"] == [171.0, 151.0, 131.0, 111.0]
    assert peaks["sequential"] == [111.0] * 4
    half = uniform(4, resident_bytes=50.0, saved_bytes=5.0, weight=1.0)
    assert simulate(zbv(2, 6), half).peak_memory.tolist() == [120.0, 120.0]


@pytest.mark.parametrize(("up", "down"), [(10.0, 20.0), (30.0, 20.0)])
def test_messages_count_at_their_sender_and_their_receiver(up, down):
    costs = uniform(2, forward_bytes=up, backward_bytes=down)
    found = simulate(Cycle.of(find_schedule("sequential", 2)), costs, Cluster(LinkSpeed(1.0, 20.0)))
    assert found.peak_memory.tolist() == [max(up, down)] * 2
    workers, times, size = found.trace.memory()
    own, held = times[workers == 0], size[workers == 0]
    forward = next(e for e in found.trace.events() if e.worker == 0 and e.kind == "F")
    sending = (own >= forward.end) & (own < forward.end + up / 20)
    assert held[sending][-1] == up


@SMALL
@given(cycles(), st.data(), clusters)
def test_memory_is_never_negative(cycle, data, cluster):
    own = st.builds(StageCosts, forward=seconds, backward=seconds, saved_bytes=seconds, forward_bytes=seconds)
    stages = data.draw(st.lists(own, min_size=cycle.stages, max_size=cycle.stages))
    workers, times, size = simulate(cycle, stages, cluster).trace.memory()
    # Of changes at the same moment, only the sum counts: operations may take no time.
    last = np.append((np.diff(workers) != 0) | (np.diff(times) != 0), True)
    assert (size[last] >= -1e-6).all()


def test_thousands_of_workers_need_few_steps():
    stages = 100
    cycle = Cycle.of(low_staleness(stages, 8))
    uneven = [StageCosts(forward=1.0 + (s == 50), backward=2.0) for s in range(stages)]
    found = simulate(cycle, uneven, Cluster(jitter=0.01), replicas=100, updates=2)
    assert found.cycle.workers * found.replicas == 10_000
    assert found.limiting_worker == 50
    assert found.seconds_per_update == pytest.approx(8 * 4, rel=0.05)


def test_a_timeline_shows_every_worker():
    picture = draw_timeline(simulate(Cycle.of(lock_step(3, 2)), uniform(3, update=0.5)), "three & one")
    assert picture.count(">worker ") == 3
    assert picture.count("three &amp; one") == 2  # the heading, and the title that is read out
    assert "stage 1: backward, micro-batch" in picture


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: simulate(Cycle.of(lock_step(2)), uniform(3)), "costs of 3 stages for 2 stages"),
        (lambda: simulate(Cycle.of(lock_step(2)), uniform(2), replicas=0), "replicas is 0"),
        (lambda: simulate(Cycle.of(lock_step(2)), uniform(2), updates=0), "updates is 0"),
        (lambda: Cycle.of(lock_step(2), [0]), "placement has 1 workers for 2 stages"),
        (lambda: Cycle.of(lock_step(2), [0, 2]), "at least one stage"),
        (lambda: LinkSpeed(latency=-1), "latency is -1"),
        (lambda: LinkSpeed(bandwidth=0), "bandwidth is 0"),
        (lambda: Cluster(node_size=0), "node_size is 0"),
        (lambda: Cluster(jitter=-1), "jitter is -1"),
        (lambda: Cluster(stragglers=2), "stragglers is 2"),
        (lambda: Cluster(slowdown=0), "slowdown is 0"),
        (lambda: zbv(0, 1), "zbv has 0 workers"),
        (lambda: Cycle.of_programs("x", [[Operation(0, "F", 0)], [Operation(1, "F", 1)]], [0, 1], 1), "deadlock"),
    ],
)
def test_mistakes_are_reported(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_numbers_in_flight_are_those_of_the_schedule():
    schedule = AsyncSchedule([5, 3, 0], 4)
    assert Cycle.of(schedule).in_flight.tolist() == [5, 3, 0]
