"""`petra memory`: counts the activations of several methods for several numbers of stages, without computing."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from petra import methods
from petra.cli.options import WHERE, ExecutionOptions, NetworkOptions, add_options, reject_unused
from petra.cli.plan_config import InputOptions, PlanConfig
from petra.formatting import render
from petra.measure import Activations, environment
from petra.measure.memory_figure import draw_memory
from petra.pipeline.fast_meta import FastMetaOperations
from petra.runs.option_fields import check_values, like, option, options_of
from petra.runs.run_folder import check_not_file
from petra.runs.run_options import TRAINING, RunOptions
from petra.trainer import Trainer, checkpoint
from petra.trainer.loss import cross_entropy
from petra.trainer.schedules import accepts


@dataclass(kw_only=True)
class MemoryOptions(InputOptions):
    """The options of `petra memory`."""

    batch_size: int = like(RunOptions, "batch_size", default=128)
    methods: tuple[str, ...] = option(
        ("backprop", "petra", "features-replay", "ddg", "dni"),
        help="training methods; the first is the one that others are compared with",
        group=TRAINING,
        metavar="NAME",
        parse=str,
        default_text="backprop petra features-replay ddg dni",
        keywords={"nargs": "+"},
    )
    stages: tuple[int, ...] = like(
        RunOptions, "stages", default=(1, 2, 3, 4), help="numbers of stages", metavar="N,N,…"
    )
    schedule: str | list[int] | None = like(RunOptions, "schedule")
    out: Path = option(Path("runs/memory"), help="folder of the results", group=WHERE, metavar="FOLDER")
    quiet: bool = like(ExecutionOptions, "quiet", help="print no progress")


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "memory",
        description="Counts the activations that each method holds at its peak, summed over the stages as if each had "
        "its own device, for several numbers of stages and one micro-batch per update. It runs on the meta device: "
        "nothing is computed, and no memory is needed. Attention counts with its T×T probabilities, which fused "
        "kernels do not store. Writes memory.json and memory.png into --out.",
        epilog="Example: petra memory --model resnet101-cifar --methods backprop features-replay ddg dni",
    )
    add_options(parser, MemoryOptions, ["model"])
    add_options(parser, NetworkOptions)
    add_options(parser, MemoryOptions, options_of(MemoryOptions).keys() - {"model"})
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Count; print, write and draw the table."""
    check_values(MemoryOptions, vars(options))
    check_not_file(options.out)
    names = list(dict.fromkeys(name for text in options.methods for name in text.split(",")))
    reject_unused(options, names)
    numbers = [options.stages] if isinstance(options.stages, int) else options.stages
    configs = {name: {j: _config(options, name, j) for j in sorted(set(numbers))} for name in names}
    rows: dict[str, dict[int, list[int]]] = {}
    for name, own in configs.items():
        for j, config in own.items():
            if not options.quiet:
                print(f"petra memory: {name}, J = {j} …", file=sys.stderr)
            rows.setdefault(name, {})[j] = count(config)
    sums = {name: {j: sum(found) for j, found in own.items()} for name, own in rows.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    one = next(iter(configs[names[0]].values()))
    what = {name: getattr(one, name) for name in ("model", "model_options", "image", "batch_size")}
    what["schedule"] = options.schedule
    found = {"bytes_of_stages": rows, "environment": environment()}
    checkpoint.write_json(options.out / "memory.json", {**what, **found})
    print(table(sums))
    drawn = draw_memory(sums, options.out / "memory.png", f"{options.model}, batch {options.batch_size}")
    print(f"activations of all stages; in {options.out}{'' if drawn else '; no figure: pip install matplotlib'}")


def _config(options: argparse.Namespace, method: str, stages: int) -> PlanConfig:
    asked = options.schedule
    schedule = asked if asked is not None and accepts(methods.find(method), asked) else None
    others: dict[str, Any] = {"ranks": 1, "accumulate": 1, "memory_limit": None, "ticks": 1, "no_run": True}
    others |= {"latency": 0.0, "bandwidth": None, "optimizer": "sgd", "optimizer_state": "float32"}
    return PlanConfig.from_options(
        argparse.Namespace(**{**vars(options), **others, "method": method, "schedule": schedule, "stages": stages})
    )


def count(config: PlanConfig) -> list[int]:
    """Return the bytes of activations of every stage at their peak, in a tick with a full pipeline."""
    with torch.device("meta"):
        network = config.network()
    inputs, targets = (x.to("meta") for x in config.batch())
    trainer = Trainer(
        network,
        loss=cross_entropy,
        optimizer=config.make_optimizer,
        method=config.method,
        stages=config.stages or 1,
        schedule=config.schedule,
    )
    with FastMetaOperations():
        for _ in range(trainer.schedule.staleness(0) + 1):
            trainer.step(inputs, targets)
        with Activations(trainer.executor) as found:
            trainer.step(inputs, targets)
    return [found.stages[stage.index] for stage in trainer.stages]


def table(sums: dict[str, dict[int, int]]) -> str:
    """Return two tables with one row per method: MiB per number of stages, and their ratio to the first method."""
    first, basic = next(iter(sums.items()))
    counts = [f"J = {j}" for j in basic]
    sizes = [[name, *(f"{size / 2**20:.2f}" for size in own.values())] for name, own in sums.items()]
    ratios = [[name, *(f"{own[j] / basic[j]:.2f}" for j in basic)] for name, own in sums.items()]
    return "\n\n".join([render(["MiB", *counts], sizes), render([f"relative to {first}", *counts], ratios)])
