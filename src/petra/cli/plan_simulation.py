"""`petra plan --simulate`: simulates a pipeline on a cluster that need not exist."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from petra import methods
from petra.cli.plan_config import PlanConfig, listed
from petra.formatting import counted, mebibytes, render
from petra.measure import StageCounter, environment, profile
from petra.pipeline import balance, partition
from petra.runs.option_fields import flag_of, option, options_of
from petra.simulation import Cluster, Cycle, LinkSpeed, Simulation, StageCosts, draw_timeline, simulate
from petra.trainer import checkpoint
from petra.trainer.loss import cross_entropy

SIMULATION = "simulation"
_ROWS = 8
"""The number of workers shown from each end of a long pipeline."""


@dataclass(kw_only=True)
class SimulationOptions:
    """The options of `petra plan --simulate`."""

    simulate: bool = option(
        False,
        help="start no processes, but simulate the schedule on --ranks workers per pipeline, which need not exist",
        group=SIMULATION,
    )
    replicas: int = option(1, help="pipelines that average gradients", group=SIMULATION, metavar="N", minimum=1)
    teraflops: float | None = option(
        None,
        help="10^12 floating-point operations per second of a worker: count those of the layers instead of timing them",
        group=SIMULATION,
        metavar="X",
        above=0,
        default_text="time the layers here",
    )
    node_size: int | None = option(
        None, help="workers per node", group=SIMULATION, metavar="N", minimum=1, default_text="all on one"
    )
    network_latency: float = option(0.0, help="--latency between nodes", group=SIMULATION, metavar="MS", minimum=0)
    network_bandwidth: float | None = option(
        None,
        help="--bandwidth between nodes",
        group=SIMULATION,
        metavar="GBIT/S",
        above=0,
        default_text="no limit",
    )
    no_overlap: bool = option(False, help="workers do not compute while they send", group=SIMULATION)
    jitter: float = option(
        0.0,
        help="standard deviation of durations, divided by their mean",
        group=SIMULATION,
        metavar="X",
        minimum=0,
        below=10,
    )
    stragglers: float = option(0.0, help="share of slower workers", group=SIMULATION, metavar="X", minimum=0, maximum=1)
    slowdown: float = option(1.5, help="how much slower they are", group=SIMULATION, metavar="X", above=0, below=1e6)
    timeline: Path | None = option(
        None, help="draw the last updates as SVG", group=SIMULATION, metavar="FILE", default_text="none"
    )


def reject_without_simulate(options: Any) -> None:
    """Raise ValueError for an option of the simulation if there is none."""
    for name, (field, described) in options_of(SimulationOptions).items():
        if getattr(options, name) != field.default and not options.simulate:
            raise ValueError(f"{flag_of(name, described)} is for simulations: add --simulate, or leave it out")


def cluster_of(options: Any) -> Cluster:
    """Return the cluster that the options describe."""
    network = None
    if options.node_size is not None:
        network = _link(options.network_latency, options.network_bandwidth)
    elif options.network_latency or options.network_bandwidth is not None:
        raise ValueError("--network-latency and --network-bandwidth are between nodes: give --node-size too")
    return Cluster(
        link=_link(options.latency, options.bandwidth),
        network=network,
        node_size=options.node_size,
        overlap=not options.no_overlap,
        jitter=options.jitter,
        stragglers=options.stragglers,
        slowdown=options.slowdown,
    )


def run_simulation(config: PlanConfig, options: Any) -> None:
    """Simulate, and print and write the result."""
    cluster = cluster_of(options)
    cuts, costs, placement = _costs(config, options.teraflops)
    schedule = config.make_schedule(len(cuts))
    placement = getattr(schedule, "placement", placement)
    if max(placement) + 1 != config.ranks:
        raise ValueError(
            f"--schedule {schedule.name} puts {len(cuts)} stages on {max(placement) + 1} workers, but --ranks is "
            f"{config.ranks}: give as many stages as it has workers times stages per worker"
        )
    found = simulate(Cycle.of(schedule, placement), costs, cluster, replicas=options.replicas)
    layers = [[i for s, cut in enumerate(cuts) if placement[s] == w for i in cut] for w in range(config.ranks)]
    if options.json is not None:
        result = {
            "config": asdict(config),
            "cluster": asdict(cluster),
            "layers": layers,
            "costs": [asdict(c) for c in costs],
            **found.to_json(),
            "environment": environment(),
        }
        checkpoint.write_json(options.json, json.loads(json.dumps(result).replace("Infinity", "null")))
    if options.timeline is not None:
        title = f"{config.model}, {config.method}, {schedule.name}: {counted(config.ranks, 'worker')}"
        options.timeline.write_text(draw_timeline(found, title), encoding="utf-8")
    print(report(config, layers, found))
    if options.timeline is not None:
        print(f"wrote {options.timeline}")


def report(config: PlanConfig, layers: list[list[int]], found: Simulation) -> str:
    """Return the totals, and a table of the workers."""
    memory, idle, busy = found.peak_memory, found.idle, found.busy
    most, largest = found.limiting_worker, int(memory.argmax())
    every = range(config.ranks)
    shown = sorted({*every[:_ROWS], *every[-_ROWS:], most, largest})
    milliseconds = 1e3 * found.seconds_per_update / found.microbatches_per_update
    rows = [
        [w, listed(layers[w]), f"{busy[w] * milliseconds:.2f}", f"{idle[w]:.1%}", mebibytes(int(memory[w]))]
        for w in shown
    ]
    samples = found.microbatches_per_second * config.batch_size
    lines = [
        f"{config.model} with {config.method}, {found.cycle.name}, simulated on "
        f"{counted(config.ranks * found.replicas, 'worker')}: {config.ranks} per "
        f"pipeline, {counted(found.cycle.stages, 'stage')}, {counted(found.replicas, 'replica')}; micro-batches of "
        f"{config.batch_size}, {found.microbatches_per_update} per update",
        "",
        render(["worker", "layers", "ms per micro-batch", "idle", "peak memory"], rows, left=2),
        "",
    ]
    if len(shown) < config.ranks:
        lines.insert(3, f"({config.ranks - len(shown)} more workers; --json FILE has all of them)")
    lines += [
        f"update: {1e3 * found.seconds_per_update:.2f} ms",
        f"throughput: {samples:.4g} samples per second of all replicas",
        f"idle: {found.bubble:.1%} of all workers' time; worker {most} limits the speed",
        *([f"averaging gradients: {found.averaging.max():.1%} of a worker's time"] if found.replicas > 1 else []),
        f"memory: at most {mebibytes(int(memory[largest]))}, worker {largest}",
    ]
    if config.memory_limit is not None:
        over = [w for w in range(config.ranks) if memory[w] > config.memory_limit]
        limit = mebibytes(config.memory_limit)
        lines.append(f"above the limit of {limit}: {listed(over)}" if over else f"all workers are below {limit}")
    return "\n".join(lines)


def _costs(config: PlanConfig, teraflops: float | None) -> tuple[list[range], list[StageCosts], list[int]]:
    """Return layers and costs of each stage, and its worker."""
    method = methods.find(config.method)
    inputs, targets = config.batch()
    parts: dict[str, Any] = {
        "loss": cross_entropy,
        "optimizer": config.make_optimizer,
    }
    with torch.device("meta"):
        network = list(config.network())
    counter = StageCounter(network, method, (inputs,), targets, **parts)
    wanted = config.ranks if config.stages is None else config.stages
    if teraflops is None:
        if not config.quiet:
            print(f"petra plan: timing {counted(len(network), 'layer')} in this process …", file=sys.stderr, flush=True)
        torch.set_num_threads(config.threads)
        own = profile(list(config.network()), method, (inputs,), targets, **parts)
        seconds = [layer.per_tick(config.accumulate) for layer in own.layers]
    else:
        speed = teraflops * 1e12
        layers = [counter.costs(range(i, i + 1), speed) for i in range(len(network))]
        seconds = [layer.forward + layer.backward for layer in layers]
    cuts = partition(len(network), wanted)
    if isinstance(wanted, int):
        cuts = balance(len(network), wanted, lambda _, cut: sum(seconds[cut.start : cut.stop]))
    if teraflops is None:
        costs = [counter.timed_costs(cut, own) for cut in cuts]
    else:
        costs = [counter.costs(cut, speed) for cut in cuts]
    placement = [worker for worker, stages in enumerate(partition(len(cuts), config.ranks)) for _ in stages]
    return cuts, costs, placement


def _link(latency: float, bandwidth: float | None) -> LinkSpeed:
    """Return a link, from milliseconds and 10^9 bits per second."""
    return LinkSpeed(latency / 1e3) if bandwidth is None else LinkSpeed(latency / 1e3, bandwidth * 1e9 / 8)
