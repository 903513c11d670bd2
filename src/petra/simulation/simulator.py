"""The discrete-event simulation: when does every worker perform every operation of a schedule.

The order of the operations of each worker is fixed, so no queue of events is needed. An operation begins as soon as its
worker is free and its message has arrived. Going through the steps of a cycle, one after the other, gives all times;
the operations of a step, and all replicas, are computed at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from petra.simulation.costs import Cluster, StageCosts
from petra.simulation.cycle import Cycle
from petra.simulation.result import Simulation
from petra.simulation.state import Snapshot, State
from petra.simulation.trace import Trace

_JITTERED = 20
"""The number of updates to average over if durations are random."""
_PERIOD = 8
"""The largest number of cycles after which times may repeat."""
_RECORDED = 64
"""The number of micro-batches that a trace has at most, if a cycle has fewer."""


def simulate(
    cycle: Cycle,
    costs: Sequence[StageCosts],
    cluster: Cluster | None = None,
    *,
    replicas: int = 1,
    updates: int | None = None,
    seed: int = 0,
) -> Simulation:
    """Simulate a pipeline, or several replicas of it that average gradients at every update.

    Replicas are simulated one by one only if jitter or stragglers make them differ.

    Args:
        cycle: What the workers do: `Cycle.of(schedule)`.
        costs: The costs of each stage.
        cluster: The links, and how the speeds of workers differ; by default, messages take no time.
        replicas: The number of pipelines.
        updates: Measure at least this many updates; by default as many as it takes.
        seed: Decides which workers are stragglers, and the jitter.

    Returns:
        Times, idle shares, memory and the trace of the last updates.

    Raises:
        ValueError: The numbers of costs and stages differ, or a number is less than 1.
    """
    cluster = cluster or Cluster()
    if len(costs) != cycle.stages:
        raise ValueError(f"there are costs of {len(costs)} stages for {cycle.stages} stages: give one for each stage")
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}: give the number of pipelines, 1 or more")
    if updates is not None and updates < 1:
        raise ValueError(f"updates is {updates}: give the number of updates to measure, 1 or more")
    wanted = updates if updates is not None else (_JITTERED if cluster.uneven else 1)
    state = State(cycle, costs, cluster, replicas if cluster.uneven else 1, replicas, seed)
    number, period = _settle(state, cluster.jitter == 0)
    # Without a period, the mean over as many cycles as it took to settle is close to that of the steady state.
    measured = max(-(-wanted // cycle.updates), period or (1 if cycle.settles <= 3 else cycle.settles))
    if period:
        measured = -(-measured // period) * period
    skew = min(_RECORDED, 2 * int(cycle.in_flight.max()) + 2)
    recorded = max(2, -(-skew // cycle.microbatches))
    trace = Trace(cycle, tuple(costs))
    began, busy, averaging = state.clock.max(), state.busy.copy(), state.averaging.copy()
    for step in range(measured):
        state.run(number + step, trace if step >= measured - recorded else None)
    seconds = max(float(state.clock.max() - began), 1e-300)
    busy, averaging = state.busy - busy, state.averaging - averaging
    for step in range(max(0, recorded - measured)):
        state.run(number + measured + step, trace)
    return Simulation(
        cycle=cycle,
        costs=tuple(costs),
        replicas=replicas,
        seconds_per_update=seconds / (measured * cycle.updates),
        busy=busy.mean(axis=1) / seconds,
        averaging=averaging.mean(axis=1) / seconds,
        trace=trace,
    )


def _settle(state: State, repeats: bool) -> tuple[int, int | None]:
    """Run cycles until times repeat, or until they should be those of the steady state.

    Returns:
        The number of cycles, and after how many of them times repeat, if they do.
    """
    recent = deque[Snapshot](maxlen=_PERIOD)
    for number in range(state.cycle.settles):
        state.run(number, None)
        if repeats:
            # Each time depends on others by maxima and sums alone. So if all have increased by the same amount, they
            # will do so again.
            snapshot = state.snapshot(number)
            for period, earlier in enumerate(reversed(recent), 1):
                if snapshot.repeats(earlier):
                    return number + 1, period
            recent.append(snapshot)
    return state.cycle.settles, None
