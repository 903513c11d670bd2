"""`petra compare`: trains with several methods on the same network, data and seed."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petra import methods
from petra.cli.device import reject_cuda_graph, reject_processes, set_up_device
from petra.cli.options import WHERE, add_options, add_run_options, given, reject_unused, reporting
from petra.cli.plot import read_curves
from petra.formatting import mebibytes, render, terminal_width
from petra.measure.run_figure import check_plots, draw_runs
from petra.pipeline import Diverged
from petra.runs.config import RunConfig
from petra.runs.option_fields import option
from petra.runs.run import Run
from petra.runs.run_folder import CHECKPOINTS, CONFIG, check_no_run, check_not_file
from petra.runs.run_options import TRAINING
from petra.runs.weight_files import check_weights
from petra.trainer import checkpoint
from petra.trainer.schedules import accepts

DIVERGED = "diverged"
"""Marks a diverged method in the table; key of its error in comparison.json."""


@dataclass(kw_only=True)
class CompareOptions:
    """The methods to compare, and where to write the comparison."""

    methods: tuple[str, ...] = option(
        ("reversible", "petra"),
        help="training methods; `petra methods` lists them",
        group=TRAINING,
        metavar="NAME",
        parse=str,
        default_text="reversible petra",
        keywords={"nargs": "+"},
    )
    out: Path = option(Path("runs/compare"), help="folder of the comparison", group=WHERE, metavar="FOLDER")
    resume: bool = option(
        False,
        help="continue the comparison in --out; methods that have finished are not trained again",
        group=WHERE,
        exclusive="existing run",
    )
    overwrite: bool = option(
        False, help="replace the runs of an earlier comparison", group=WHERE, exclusive="existing run"
    )
    plot: bool = option(False, help="draw loss against epochs and seconds into comparison.png in --out", group=WHERE)


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "compare",
        description="Trains the same network on the same data and seed with several methods, and prints a table. "
        "If one of them diverges, the table says so, and the others continue.",
        epilog="Example: petra compare --recipe digits --methods backprop reversible petra delayed",
    )
    add_run_options(parser, with_method=False)
    add_options(parser, CompareOptions)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Train with each method; print, write and draw the comparison."""
    if options.plot:
        check_plots()
    reject_processes("methods are compared in one process")
    check_not_file(options.out)
    asked = given(options)
    if options.resume and options.recipe is None and "model" not in asked:
        raise ValueError(
            "--resume needs the options of the comparison, because each method is compared with them: "
            "give --recipe or --model and the others as before"
        )
    names = list(dict.fromkeys(name for text in options.methods for name in text.split(",")))
    reject_unused(options, names)
    configs = []
    for name in names:
        method = methods.find(name)
        others: dict[str, Any] = {}
        if options.schedule is not None and not accepts(method, options.schedule):
            others["schedule"] = None
        if not method.stale:
            others["corrections"] = ()
        configs.append(RunConfig.from_options(options.recipe, {**asked, "method": name, **others}))
        configs[-1].validate()
        if options.resume:
            _check_same(configs[-1], options.out / name)
        elif not options.overwrite:
            check_no_run(options.out / name, "--resume to continue it, --overwrite to replace it")
        if not (options.resume and (options.out / name / CHECKPOINTS).exists()):  # else it continues from there
            check_weights(configs[-1].init_from, options.out / name)
    reject_cuda_graph(options)
    device = set_up_device(options)
    data = configs[0].load_data()
    summaries: list[dict[str, Any]] = []
    lost: dict[str, str] = {}
    for config in configs:
        folder = options.out / config.method
        arguments = {"overwrite": options.overwrite, "resume": options.resume, "device": device, "data": data}
        training = Run(config, folder, **arguments, **reporting(options))
        try:
            summaries.append(training())
        except Diverged as error:  # a result like others
            lost[config.method] = str(error)
            layout = training.trainer.layout
            described = {"method": config.method, "stages": layout["stages"], "schedule": layout["schedule"]}
            summaries.append({**described, DIVERGED: str(error)})
    checkpoint.write_json(options.out / "comparison.json", summaries)
    if options.plot:
        labels = {name: f"{name}, {DIVERGED}" if name in lost else name for name in names}
        draw_runs([read_curves(options.out / name, labels[name]) for name in names], options.out / "comparison.png")
    sys.stderr.flush()
    print(table(summaries), flush=True)
    if lost:
        reason = next(iter(lost.values())).removeprefix("training diverged: ")
        raise Diverged(f"{' and '.join(lost)} {DIVERGED}: {reason}")


def _check_same(config: RunConfig, folder: Path) -> None:
    """Raise ValueError if the folder holds a run with other options."""
    if not (folder / CONFIG).exists():
        return
    written = RunConfig.read(folder / CONFIG).to_json()
    for name, value in config.to_json().items():
        if written[name] != value:
            raise ValueError(
                f"the run in {folder} has {name} {written[name]}, not {value}: give the same options, or another --out"
            )


def table(summaries: list[dict[str, Any]]) -> str:
    """Return the comparison as a table with one row per method."""
    of_text = any("bits_per_byte" in s for s in summaries)
    columns = ["test accuracy", *["bits per byte"] * of_text, "samples/s", "peak activation memory", "stashed weights"]

    def cells(s: dict[str, Any]) -> list[str]:
        if DIVERGED in s:
            return [DIVERGED, *[""] * (len(columns) - 1)]
        return [
            f"{s['test_accuracy']:.2%}",
            *([f"{s['bits_per_byte']:.4f}"] if of_text else []),
            f"{s['samples_per_second']:.0f}",
            mebibytes(s["activation_peak_bytes"]),
            mebibytes(sum(stage["stashed_weights"] for stage in s["memory_bytes"])),
        ]

    rows = [[s["method"], len(s["stages"]), s["schedule"], *cells(s)] for s in summaries]
    return render(["method", "stages", "schedule", *columns], rows, width=terminal_width())
