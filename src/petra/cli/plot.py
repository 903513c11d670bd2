"""`petra plot`: draws finished or unfinished runs in one figure."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petra.cli.options import add_options
from petra.formatting import counted
from petra.measure.run_figure import Curves, check_plots, draw_runs
from petra.runs.file_hashes import read_json, read_lines
from petra.runs.option_fields import option
from petra.runs.run_folder import CONFIG, CONFIG_REMEDY, FIDELITY, METRICS, check_not_folder


@dataclass(kw_only=True)
class PlotOptions:
    """The options of `petra plot`."""

    folders: Path = option(
        help="folders of `petra train` or `petra fidelity`",
        metavar="FOLDER",
        positional=True,
        keywords={"nargs": "+"},
    )
    out: Path = option(Path("runs.png"), help="figure to write", metavar="FILE")


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plot",
        description="Draws the loss of runs against epochs and seconds, their accuracy, and σ of every stage where "
        "`petra fidelity` has measured it.",
        epilog="Example: petra plot runs/fr runs/ddg runs/petra --out sigma.png",
    )
    add_options(parser, PlotOptions)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Draw the runs in the folders."""
    check_not_folder("--out", options.out)
    if options.out.suffix.lower() not in ("", ".png"):
        raise ValueError(f"--out is {options.out}, but figures are PNG: give a name that ends in .png")
    names = [folder.resolve().name for folder in options.folders]
    curves = [
        read_curves(folder, str(folder) if names.count(name) > 1 else name)
        for folder, name in zip(options.folders, names, strict=True)
    ]
    check_plots()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw_runs(curves, options.out)
    print(f"{counted(len(options.folders), 'run')} in {options.out}")


def read_curves(folder: Path, name: str) -> Curves:
    """Return the metrics of the run in a folder, which need not have finished."""
    if not (folder / METRICS).exists():
        raise ValueError(f"{folder} holds no run: give folders of `petra train` or `petra fidelity`")
    remedy = f"`petra train --resume --out {folder}` restores its evaluations from the checkpoint"
    found = read_lines(folder, METRICS, remedy)
    method = str(read_json(folder, CONFIG, CONFIG_REMEDY).get("method", "")) if (folder / CONFIG).exists() else ""
    measured = read_lines(folder, FIDELITY, "restore a copy, or remove it") if (folder / FIDELITY).exists() else []
    return Curves(name, found, measured, method)
