"""`petra plot`: draws finished or unfinished runs in one figure."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petra.cli.options import add_options
from petra.formatting import counted
from petra.measure.run_figure import Curves, check_plots, draw_runs
from petra.runs.option_fields import option
from petra.runs.run_folder import CONFIG, FIDELITY, METRICS, check_not_folder


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
    return Curves(name, _lines(folder / METRICS), _lines(folder / FIDELITY), _method(folder / CONFIG))


def _method(path: Path) -> str:
    """Return the method of a run; an empty string if its configuration cannot be read."""
    try:
        return str(json.loads(path.read_text())["method"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): remove the last line, or train it again") from error
