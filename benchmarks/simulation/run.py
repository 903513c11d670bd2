"""Compares predictions of the simulation with real pipelines on processes.

All ranks measure the costs of their own stage, without neighbours and all at the same time, and the speed of messages.
The simulation predicts the time of an update from these. Then the real pipelines are timed. Nothing is fitted to their
times. Prints a table and writes a file into the folder results next to this file.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from configurations import CONFIGURATIONS, SMOKE, TWO_CORES, Configuration
from delayed import DelayedTransport
from measurements import link, pipeline_seconds, stage_costs
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from petra.formatting import render
from petra.measure import environment
from petra.schedule import find_schedule
from petra.simulation import Cluster, Cycle, LinkSpeed, StageCosts, simulate


def predict(configuration, costs, alone, speed):
    """Return the predicted simulation.

    The ranks slow each other down in proportion to how many are at work, which depends on the prediction.
    """
    latency, bandwidth, overhead = speed
    cycle = Cycle.of(find_schedule(configuration.schedule, configuration.ranks, configuration.accumulate))
    cluster = Cluster(
        link=LinkSpeed(latency + configuration.extra / 1e3, bandwidth),
        overhead=overhead,
        jitter=statistics.mean(cost["jitter"] for cost in costs),
    )
    stages = [
        StageCosts(
            forward=cost["forward"],
            backward=cost["backward"],
            update=cost["update"],
            forward_bytes=cost["messages"][0],
            backward_bytes=cost["messages"][1],
        )
        for cost in costs
    ]
    found, factor = simulate(cycle, stages, cluster), 1.0
    for _ in range(4):
        others = (configuration.ranks * (1 - found.bubble) - 1) / (configuration.ranks - 1)
        factor = alone + (1 - alone) * min(max(others, 0.0), 1.0)
        found = simulate(cycle, [cost.slower(factor) for cost in stages], cluster)
    return found, factor


def measure(rank, options, configurations, say):
    """Return predictions and measurements, one dictionary per configuration."""
    timeout = timedelta(seconds=options.timeout)
    transport = DelayedTransport(timeout=timeout)
    say("messages")
    speed = link(transport, options.messages)
    rows = []
    for configuration in configurations:
        say(f"costs of {configuration}")
        costs, alone = stage_costs(configuration, transport, options.cost_seconds, options.scale)
        found, factor = predict(configuration, costs, alone, speed)
        # The same number on every rank.
        predicted = transport.gather(found.seconds_per_update)[0]
        updates = min(max(3, round(options.seconds / predicted)), 200)
        say(f"{configuration}: {updates} updates, predicted {predicted:.3f} s")
        measured, windows = pipeline_seconds(configuration, transport, updates, options.scale)
        rows.append(
            {
                **asdict(configuration),
                "predicted": predicted,
                "measured": measured,
                "ratio": predicted / measured,
                "windows": windows,
                "updates": updates,
                "bubble": found.bubble,
                "contention": factor,
                "costs": costs,
                "alone": alone,
                "link": speed,
            }
        )
        if rank == 0 and options.verbose:
            print(f"{configuration}: predicted {predicted:.3f} s, measured {measured:.3f} s", flush=True)
    say("done")
    return rows


def work(rank, options, configurations, folder):
    """Run one rank, which writes its rows, or its error."""
    torch.set_num_threads(1)

    def say(what):
        Path(folder, f"{rank}.activity").write_text(what)

    try:
        say("initializing the process group")
        limit = timedelta(seconds=options.timeout)
        ranks = configurations[0].ranks
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks, timeout=limit)
        rows = measure(rank, options, configurations, say)
        Path(folder, f"{rank}.json").write_text(json.dumps(rows))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        raise


def launch(options, configurations):
    """Run configurations with the same number of ranks, and return the rows of the first rank."""
    ranks = configurations[0].ranks
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.start_processes(
            work, (options, configurations, folder), ranks, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + options.limit
        problem = None
        try:
            while not context.join(timeout=1, grace_period=2):
                if time.monotonic() > deadline:
                    problem = f"not done after {options.limit:.0f} s: raise --limit, or choose fewer configurations"
                    break
        except (ProcessRaisedException, ProcessExitedException) as error:
            problem = str(error)
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        if problem is not None:
            files = sorted(Path(folder).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
            activities = [f"rank {p.stem}: {p.read_text()}" for p in sorted(Path(folder).glob("*.activity"))]
            first = files[0].read_text() if files else problem
            raise SystemExit("\n".join([first, *activities]))
        return json.loads(Path(folder, "0.json").read_text())


def report(rows):
    """Print the table."""
    table = [
        [
            row["network"],
            row["method"],
            row["schedule"],
            row["ranks"],
            row["accumulate"],
            f"{row['extra']:g}",
            f"{row['predicted'] * 1e3:.1f}",
            f"{row['measured'] * 1e3:.1f}",
            f"{min(row['windows']) * 1e3:.1f}..{max(row['windows']) * 1e3:.1f}",
            f"{row['ratio']:.3f}",
        ]
        for row in rows
    ]
    header = ["network", "method", "schedule", "J", "k", "delay ms", "predicted ms", "measured ms", "windows", "ratio"]
    print(render(header, table, left=3))
    close = sum(abs(row["ratio"] - 1) <= 0.1 for row in rows)
    print(f"\n{close} of {len(rows)} predictions are within 10 % of the measurement")


def main(arguments=None):
    """Measure, predict and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--configurations",
        nargs="+",
        type=Configuration.parse,
        metavar="RANKS:NETWORK:METHOD:SCHEDULE:K:MILLISECONDS",
        help="default: those of the table in README.md",
    )
    parser.add_argument("--two-cores", action="store_true", help="17 configurations for a machine with two cores")
    parser.add_argument("--ranks", type=int, nargs="+", help="only the configurations with these numbers of ranks")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds to time each pipeline, at least 3 updates")
    parser.add_argument("--cost-seconds", type=float, default=1.0, help="seconds to measure the costs of stages")
    parser.add_argument("--messages", type=int, default=40, help="round trips to measure the link")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of widths, batch sizes and lengths")
    parser.add_argument("--smoke", action="store_true", help="tiny, on two ranks; stores nothing")
    parser.add_argument("--verbose", action="store_true", help="print each result when it is there")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that a rank waits for another")
    parser.add_argument("--limit", type=float, default=240, help="seconds after which a job is stopped")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args(arguments)
    default = TWO_CORES if options.two_cores else CONFIGURATIONS
    configurations = options.configurations or [Configuration.parse(c) for c in default]
    if options.smoke:
        configurations = [Configuration.parse(c) for c in SMOKE]
        options.seconds, options.cost_seconds, options.scale, options.messages = 0.2, 0.1, 0.25, 4
    configurations = [c for c in configurations if options.ranks is None or c.ranks in options.ranks]
    if not configurations:
        raise SystemExit(f"--ranks is {options.ranks}, but no configuration has as many: leave it out")
    multiprocessing.set_forkserver_preload(["torch", "petra"])  # imported once, not once per rank
    rows = []
    for _, group in groupby(sorted(configurations, key=lambda c: c.ranks), key=lambda c: c.ranks):
        rows += launch(options, list(group))
    report(rows)
    if not options.smoke:
        where = environment()
        options.out.mkdir(exist_ok=True)
        name = f"{where['machine']}-{where['cores']}-cores.json"
        (options.out / name).write_text(json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
