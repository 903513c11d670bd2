"""`petra report`: writes everything that runs have recorded into one HTML file."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from petra.cli.options import add_options, spell_options
from petra.formatting import counted
from petra.report import read_run, report, run_folders
from petra.runs.config import RunConfig
from petra.runs.option_fields import option
from petra.runs.run_folder import REPORT, check_not_folder


@dataclass(kw_only=True)
class ReportOptions:
    """The options of `petra report`."""

    folders: Path = option(
        help="folders of runs, or of comparisons",
        metavar="RUN",
        positional=True,
        keywords={"nargs": "+"},
    )
    out: Path | None = option(
        None,
        help="HTML file to write",
        metavar="FILE",
        default_text=f"{REPORT} in the folder of the run or of the comparison, else here",
    )


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "report",
        description="Writes one HTML file about one run or several: losses, accuracy and learning rates, staleness and "
        "memory of every stage, the timeline of --trace, the gradients of `petra fidelity`, options and environment. "
        "The file needs no network and no other file. Runs that have not finished are reported as far as they are.",
        epilog="Example: petra report runs/digits-petra runs/digits-delayed --out report.html",
    )
    add_options(parser, ReportOptions)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Read the runs and write the report."""
    folders = run_folders(options.folders)
    here = options.folders[0] if len(options.folders) == 1 else Path()
    out: Path = here / REPORT if options.out is None else options.out
    check_not_folder("--out", out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out is {out}, but a report is HTML: give a name that ends in .html")
    names = [folder.resolve().name for folder in folders]
    runs = [
        read_run(folder, str(folder) if names.count(name) > 1 else name, command_of)
        for folder, name in zip(folders, names, strict=True)
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(report(runs), encoding="utf-8")
    temporary.replace(out)
    for record in runs:
        for problem in record.problems:
            print(f"{record.name}: {problem}")
    print(f"{counted(len(runs), 'run')} in {out}")


def command_of(config: Mapping[str, Any]) -> str:
    """Return the command that trains a run with this `config.json`, without options at their defaults."""
    known = RunConfig.from_json(dict(config)).to_json()
    defaults = {f.name: f.default for f in fields(RunConfig) if f.default is not MISSING}
    usual = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    always = ("method", "stages")
    needed = {n: value for n, value in known.items() if n in always or n not in usual or usual[n] != value}
    return shlex.join(["petra", "train", *spell_options({name: v for name, v in needed.items() if v is not None})])
