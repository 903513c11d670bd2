"""`petra compare`: several methods on the same network, data and seed, side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from petra import methods
from petra.cli.options import (
    add_run_options,
    given,
    refuse_capture,
    refuse_processes,
    refuse_unused,
    reporting,
    set_up_device,
)
from petra.cli.plot import read
from petra.execution import Diverged
from petra.measure.run_figure import check_plots, draw_runs
from petra.tables import mebibytes, render
from petra.training import checkpoint
from petra.training.config import RunConfig
from petra.training.files import CHECKPOINTS, CONFIG, refuse_file, refuse_to_overwrite
from petra.training.run import Run
from petra.training.weights import check_weights

DIVERGED = "diverged"
"""In the table, and in comparison.json the name of what a method said that did."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "compare",
        help="train with several methods and compare them",
        description="Trains the same network on the same data and seed with several methods, and prints a table. "
        "One that diverges is in it as such; the others go on.",
        epilog="Example: petra compare --recipe digits --methods backprop reversible petra delayed",
    )
    add_run_options(parser, with_method=False)
    parser.add_argument(
        "--methods", nargs="+", metavar="NAME", default=["reversible", "petra"], help="default: reversible petra"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=Path("runs/compare"), help="default %(default)s")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume", action="store_true", help="go on with the comparison in --out: what has finished is not run again"
    )
    existing.add_argument("--overwrite", action="store_true", help="replace the runs of an earlier comparison")
    parser.add_argument(
        "--plot", action="store_true", help="draw losses against epochs and seconds into comparison.png in --out"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Train with each method, then print and write the table, and draw the figure if asked for."""
    if options.plot:
        check_plots()
    refuse_processes("methods are compared in one process")
    refuse_file(options.out)
    asked = given(options)
    if options.resume and options.recipe is None and "model" not in asked:
        raise ValueError(
            "--resume needs the options of the comparison, for each method is held against them: "
            "give --recipe or --model and the others as before"
        )
    names = list(dict.fromkeys(name for text in options.methods for name in text.split(",")))
    refuse_unused(options, names)
    configs = []
    for name in names:
        method = methods.find(name)
        others: dict[str, Any] = {} if method.pipelined else {"order": None}
        if not method.stale:
            others["corrections"] = ()
        configs.append(RunConfig.from_options(options.recipe, {**asked, "method": name, **others}))
        configs[-1].validate()
        if options.resume:
            _refuse_another(configs[-1], options.out / name)
        elif not options.overwrite:
            refuse_to_overwrite(options.out / name, "--resume to go on, --overwrite to replace it")
        if not (options.resume and (options.out / name / CHECKPOINTS).exists()):  # which has weights of its own
            check_weights(configs[-1].weights, options.out / name)
    refuse_capture(options)
    device = set_up_device(options)
    data = configs[0].load_data()
    summaries: list[dict[str, Any]] = []
    lost: dict[str, str] = {}
    for config in configs:
        folder = options.out / config.method
        how = {"overwrite": options.overwrite, "resume": options.resume, "device": device, "data": data}
        job = Run(config, folder, **how, **reporting(options))
        try:
            summaries.append(job())
        except Diverged as error:  # which is a result, and says nothing of the others
            lost[config.method] = str(error)
            layout = job.trainer.layout
            kept = {"method": config.method, "stages": layout["stages"], "order": layout["order"]}
            summaries.append({**kept, DIVERGED: str(error)})
    checkpoint.write_json(options.out / "comparison.json", summaries)
    if options.plot:
        called = {name: f"{name}, {DIVERGED}" if name in lost else name for name in names}
        draw_runs([read(options.out / name, called[name]) for name in names], options.out / "comparison.png")
    sys.stderr.flush()
    print(table(summaries), flush=True)
    if lost:
        raise Diverged(f"{' and '.join(lost)} {DIVERGED}: {next(iter(lost.values()))}")


def _refuse_another(config: RunConfig, folder: Path) -> None:
    """Raise ValueError if there is a run in the folder that was asked for in another way."""
    if not (folder / CONFIG).exists():
        return
    written = RunConfig.read(folder / CONFIG).to_json()
    for name, value in config.to_json().items():
        if written.get(name) != value:
            raise ValueError(
                f"the run in {folder} has {name} {written.get(name)}, not {value}: give the same options, "
                "or another --out"
            )


def table(summaries: list[dict[str, Any]]) -> str:
    """A row a method."""
    return render(
        ["method", "stages", "order", "test accuracy", "samples/s", "peak activation memory", "stashed weights"],
        [
            [s["method"], len(s["stages"]), s["order"], DIVERGED, "", "", ""]
            if DIVERGED in s
            else [
                s["method"],
                len(s["stages"]),
                s["order"],
                f"{s['test_accuracy']:.2%}",
                f"{s['samples_per_second']:.0f}",
                mebibytes(s["activation_peak_bytes"]),
                mebibytes(sum(stage["stashed_weights"] for stage in s["memory_bytes"])),
            ]
            for s in summaries
        ],
    )
