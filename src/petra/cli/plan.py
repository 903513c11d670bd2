"""`petra plan`: finds where to cut a network for several ranks, predicts the speed and checks the prediction."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from petra import methods
from petra.cli.device import cores, reject_processes
from petra.cli.options import ExecutionOptions, NetworkOptions, add_options
from petra.cli.plan_benchmark import basic_method, spawn_ranks
from petra.cli.plan_config import InputOptions, LinkOptions, PlanConfig, listed
from petra.cli.plan_simulation import SimulationOptions, reject_without_simulate, run_simulation
from petra.formatting import mebibytes, render
from petra.measure import Plan, environment
from petra.runs.option_fields import check_values, like, option, options_of, spell
from petra.runs.run_folder import check_not_folder
from petra.runs.run_options import TRAINING, RunOptions
from petra.trainer import checkpoint
from petra.trainer.optimizers import OPTIMIZERS

_CHECK = "check"


@dataclass(kw_only=True)
class PlanOptions(InputOptions):
    """The options of `petra plan`."""

    batch_size: int = like(RunOptions, "batch_size")
    ranks: int = option(help="number of processes", group=TRAINING, metavar="N", minimum=1)
    stages: int | list[int] | None = like(RunOptions, "stages", default=None, default_text="one per rank")
    method: str = like(RunOptions, "method")
    schedule: str | list[int] | None = like(RunOptions, "schedule")
    accumulate: int = like(RunOptions, "accumulate")
    optimizer: str = like(
        RunOptions, "optimizer", help="optimizer of every stage, which needs time and memory", choices=OPTIMIZERS
    )
    optimizer_state: str = like(RunOptions, "optimizer_state")
    memory_limit: float | None = option(
        None,
        help="memory of a rank. With method reversible, a rank stores the activations of as many layers as fit",
        group=TRAINING,
        metavar="MiB",
        above=0,
        below=1e12,
        default_text="no limit",
    )
    ticks: int = option(20, help="micro-batches to time", group=_CHECK, metavar="N", minimum=1)
    no_run: bool = option(False, help="predict only", group=_CHECK)
    json: Path | None = option(None, help="also write everything into a file", group=_CHECK, metavar="FILE")
    quiet: bool = like(ExecutionOptions, "quiet", help="print no progress", group=_CHECK)


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan",
        description="Times every layer on all ranks at once, chooses the cut whose busiest rank has the least work, "
        "predicts tick, speed-up and memory, and compares the prediction with a short run on random data. "
        "Ranks are processes on this machine, on CPU cores. Corrections of staleness are not included. "
        "For slow links, give --latency and --bandwidth: the plan then chooses the micro-batches in flight, too. "
        "With --simulate, it simulates a pipeline on any number of workers instead, from the costs of layers and the "
        "speed of links.",
        epilog="Example: petra plan --model revnet18 --ranks 4 --batch-size 64 --memory-limit 500",
    )
    add_options(parser, PlanOptions, ["model"])
    add_options(parser, NetworkOptions)
    add_options(parser, PlanOptions, options_of(PlanOptions).keys() - {"model"})
    add_options(parser, LinkOptions)
    add_options(parser, SimulationOptions)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Plan on real processes, and print the result."""
    check_values(PlanOptions, vars(options))
    check_values(LinkOptions, vars(options))
    check_values(SimulationOptions, vars(options))
    reject_without_simulate(options)
    reject_processes("a plan starts its ranks itself")
    config = PlanConfig.from_options(options)
    if options.json is not None:
        check_not_folder("--json", options.json)
    if options.simulate:
        if options.timeline is not None:
            check_not_folder("--timeline", options.timeline)
        run_simulation(config, options)
        return
    if config.has_links:
        if options.schedule is not None:
            raise ValueError("--latency and --bandwidth choose the numbers in flight: leave --schedule out")
        if not methods.find(config.method).pipelined:
            raise ValueError(
                f"--latency and --bandwidth choose numbers in flight, but {config.method} has none: choose a pipelined "
                "method such as petra"
            )
    if config.ranks > cores():
        print(
            f"petra plan: {config.ranks} ranks share {cores()} cores and wait for them: "
            "the prediction holds with one core per rank",
            file=sys.stderr,
        )
    with tempfile.TemporaryDirectory() as folder:
        spawn_ranks(config, Path(folder))
        found = json.loads(Path(folder, "found.json").read_text())
    if "error" in found:
        raise ValueError(found["error"])
    plan = Plan(**found["plan"])
    if options.json is not None:
        result = {"config": asdict(config), "speedup": plan.speedup, **found, "environment": environment()}
        checkpoint.write_json(options.json, result)
    print(report(config, plan, found["measured"], found["in_flight"]))


def report(
    config: PlanConfig, plan: Plan, measured: dict[str, Any] | None, in_flight: list[dict[str, Any]] | None = None
) -> str:
    """Return the table, the totals, and the options to train with."""
    header = ["rank", "layers", "ms per tick", "measured", "memory", "measured", "sent up", "sent down"]
    rows = []
    for rank, layers in enumerate(plan.layers):
        rows.append(
            [
                rank,
                listed(layers),
                _ms(plan.seconds[rank]),
                _ms(measured["own"][rank]) if measured else "",
                mebibytes(plan.memory[rank]),
                mebibytes(measured["memory"][rank]) if measured else "",
                mebibytes(plan.sent_up[rank]),
                mebibytes(plan.sent_down[rank]),
            ]
        )
    if measured is None:
        rows = [[cell for i, cell in enumerate(row) if header[i] != "measured"] for row in rows]
        header = [name for name in header if name != "measured"]
    stages = ",".join(map(str, plan.stages))
    options = f"--method {config.method}" + (f" --accumulate {config.accumulate}" if config.accumulate > 1 else "")
    if config.schedule is not None:
        options += f" --schedule {spell(config.schedule)}"
    elif in_flight is not None:
        options += f" --schedule {spell(in_flight[0]['in_flight'])}"
    if config.optimizer != "sgd":
        options += f" --optimizer {config.optimizer}"
    if config.optimizer_state != "float32":
        options += f" --optimizer-state {config.optimizer_state}"
    lines = [
        f"{config.model} with {config.method} on {config.ranks} ranks, {len(plan.stages)} stages of {stages} layers; "
        f"micro-batches of {config.batch_size}, {config.threads} threads per rank",
        "",
        render(header, rows),
        "",
    ]
    storage = f" --storage {','.join(plan.storage)}" if plan.storage else ""
    placement = "" if plan.contiguous else f" --placement {','.join(map(str, plan.placement))}"
    speedup = f"speed-up over one rank working at a time ({basic_method(config.network()).name})"
    if measured is None:
        lines += [
            f"tick: predicted {_ms(plan.tick)} ms",
            f"{speedup}: predicted {plan.speedup:.2f}",
        ]
    else:
        lines += [
            f"tick: predicted {_ms(plan.tick)} ms, measured {_ms(measured['tick'])} ms, "
            f"predicted/measured {plan.tick / measured['tick']:.2f}",
            f"{speedup}: predicted {plan.speedup:.2f}, measured {measured['basic'] / measured['tick']:.2f}",
        ]
    return "\n".join(
        [
            *lines,
            *([] if in_flight is None else ["", *_in_flight_table(config, plan, in_flight)]),
            "",
            f"to train with: {options} --ranks {config.ranks} "
            f"--stages {stages if len(plan.stages) > 1 else 1}{placement}{storage}",
        ]
    )


def _in_flight_table(config: PlanConfig, plan: Plan, in_flight: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table that compares numbers in flight for the given links."""
    bandwidth = "" if config.bandwidth is None else f" and {config.bandwidth * 8 / 1e9:g} Gbit/s"
    rows = [
        [
            row["schedule"],
            spell(row["in_flight"]),
            ", ".join(f"{delay:g}" for delay in row["delays"]),
            _ms(row["tick"]),
            f"{row['throughput']:.2f}",
        ]
        for row in in_flight
    ]
    header = ["schedule", "in flight", "updates late", "ms per tick", "throughput relative to fast links"]
    return [
        f"links of {1e3 * config.latency:g} ms{bandwidth}, messages of up to "
        f"{mebibytes(max(plan.up_bytes, default=0))} and {mebibytes(max(plan.down_bytes, default=0))} back",
        "",
        render(header, rows, left=3),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
