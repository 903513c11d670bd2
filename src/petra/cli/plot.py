"""`petra plot`: runs that are there already, in one figure."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from petra.measure.run_figure import Curves, check_plots, draw_runs
from petra.names import counted
from petra.training.files import FIDELITY, METRICS, refuse_folder


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plot",
        help="draw runs side by side",
        description="Draws loss against epochs and against seconds, and accuracy, of runs in some folders; and σ of "
        "every stage, where `petra fidelity` has measured it.",
        epilog="Example: petra plot runs/fr runs/ddg runs/petra --out sigma.png",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of `petra train` or `petra fidelity`")
    parser.add_argument("--out", type=Path, metavar="FILE", default=Path("runs.png"), help="default %(default)s")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Draw what the folders hold."""
    refuse_folder("--out", options.out)
    if options.out.suffix.lower() not in ("", ".png"):
        raise ValueError(f"--out is {options.out}, but figures are PNG: give a name that ends in .png")
    names = [folder.resolve().name for folder in options.folders]
    found = [
        read(folder, str(folder) if names.count(name) > 1 else name)
        for folder, name in zip(options.folders, names, strict=True)
    ]
    check_plots()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw_runs(found, options.out)
    print(f"{counted(len(options.folders), 'run')} in {options.out}")


def read(folder: Path, name: str) -> Curves:
    """What the run in a folder has noted; it need not be done."""
    if not (folder / METRICS).exists():
        raise ValueError(f"{folder} holds no run: give folders of `petra train` or `petra fidelity`")
    return Curves(name, _lines(folder / METRICS), _lines(folder / FIDELITY))


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): remove the last line, or run it again") from error
