"""`petra fidelity`: a run, and how near its gradients are to those of backprop while it trains."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from petra.cli.options import (
    add_checkpoint_options,
    add_run_options,
    refuse_capture,
    refuse_processes,
    reporting,
    set_up_device,
)
from petra.cli.train import configure
from petra.measure import Fidelity, Measurement
from petra.measure.likeness import summarise, table
from petra.measure.likeness_figure import draw
from petra.names import counted
from petra.training import checkpoint
from petra.training.files import FIDELITY, FIDELITY_FIGURE, FIDELITY_SUMMARY, SUMMARY, refuse_to_overwrite
from petra.training.run import Run
from petra.training.weights import check_weights

EVERY = 50
"""Updates from one measurement to the next, unless another number is given."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "fidelity",
        help="train, and compare gradients with those of backprop",
        description="Trains a network as `petra train` does, and at every N-th update compares, stage by stage, the "
        "gradient that the method uses with the exact one at the same weights and samples, and with the delayed one: "
        "cosine, norm ratio and σ (the gradient's part in the exact direction). Training is the same as without it. "
        "Writes fidelity.jsonl, fidelity.json and fidelity.png into --out, beside what `petra train` writes.",
        epilog="Example: petra fidelity --recipe digits --method petra --stages 6 --every 10 --out runs/fidelity",
    )
    add_run_options(parser, with_method=True)
    parser.add_argument("--every", type=int, metavar="N", help=f"updates between two (default {EVERY})")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder of the run (default runs/fidelity-MODEL-METHOD)"
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    existing.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    add_checkpoint_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Train under watch, then print and write means, and draw the figure."""
    if options.every is not None and options.every < 1:
        raise ValueError(f"--every is {options.every}: give the number of updates, 1 or more")
    config, folder = configure(options, may_change=("checkpoint_every", "checkpoint_epochs", "data"), kind="fidelity-")
    refuse_processes("gradients are compared in one process")
    if not (options.resume or options.overwrite):
        refuse_to_overwrite(folder, "--resume to continue it, --overwrite to replace it")
    if options.resume and (folder / SUMMARY).exists() and not (folder / FIDELITY).exists():
        raise ValueError(f"the run in {folder} has ended without a measurement: give --overwrite to train it anew")
    every = _every(options, folder)
    if not options.resume:
        check_weights(config.weights, folder)
    refuse_capture(options)
    device = set_up_device(options)
    begin = {"resume": options.resume, "overwrite": options.overwrite, "device": device}
    job = Run(config, folder, **begin, **reporting(options))
    executor = job.trainer.executor
    rows = _kept(folder / FIDELITY, min(executor.state_dict()["shapes"], default=executor.microbatches))
    before = "".join(json.dumps(row) + "\n" for row in rows)
    checkpoint.write_atomically(folder / FIDELITY, lambda file: file.write(before.encode()))
    if not (folder / FIDELITY_SUMMARY).exists():
        checkpoint.write_json(folder / FIDELITY_SUMMARY, {"every": every})  # for who resumes it
    with (folder / FIDELITY).open("a") as file:

        def report(measurement: Measurement) -> None:
            row = measurement.row()
            row["epoch"] = round((row["microbatch"] + 1) / len(job.train), 4)
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()

        with Fidelity(executor, every, report):
            summary = job()
    means = summarise(rows)
    names = ("method", "model", "data", "stages", "order", "staleness", "corrections", "accumulate", "epochs", "seed")
    told = {name: summary[name] for name in names}
    checkpoint.write_json(folder / FIDELITY_SUMMARY, {**told, "every": every, "means": means})
    sys.stderr.flush()
    if not rows:
        print(f"nothing was measured: the run has fewer than {every} updates, so give a smaller --every")
        return
    print(table(rows))
    title = f"{config.model}, {config.method}, {len(summary['stages'])} stages"
    drawn = draw(rows, folder / FIDELITY_FIGURE, title)
    count = sum(row["stage"] == "all" for row in rows)
    how = "" if drawn else "; no figure: pip install matplotlib and give --resume to draw it"
    print(f"means of {counted(count, 'update')} of {config.method}; in {folder}{how}")


def _every(options: argparse.Namespace, folder: Path) -> int:
    """How often to measure: as often as before, if a run is resumed that was measured."""
    path = folder / FIDELITY_SUMMARY
    if not (options.resume and path.exists()):
        return EVERY if options.every is None else int(options.every)
    try:
        before = int(json.loads(path.read_text())["every"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it and resume again with --every") from error
    if options.every not in (None, before):
        raise ValueError(f"the run in {folder} is measured every {before} updates, not {options.every}: leave it out")
    return before


def _kept(path: Path, end: int) -> list[dict[str, Any]]:
    """What a run that is resumed has measured of micro-batches before ``end``, which had left the pipeline."""
    if not path.exists():
        return []
    try:
        lines = path.read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]  # without one it was killed over
        return [row for row in found if row["microbatch"] < end]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it and resume again") from error
