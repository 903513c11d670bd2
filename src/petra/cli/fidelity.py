"""`petra fidelity`: trains a network, and compares its gradients with those of backprop on the way."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petra.cli.device import reject_cuda_graph, reject_processes, set_up_device
from petra.cli.options import FolderOptions, add_checkpoint_options, add_options, add_run_options, reporting
from petra.cli.train import configure
from petra.formatting import counted, terminal_width
from petra.measure import Fidelity, Measurement
from petra.measure.gradient_similarity import summarise, table
from petra.measure.similarity_figure import draw
from petra.runs.file_hashes import hash_files, read_bytes, read_json, write_files
from petra.runs.option_fields import check_values, option
from petra.runs.run import Run
from petra.runs.run_folder import FIDELITY, FIDELITY_FIGURE, FIDELITY_SUMMARY, SUMMARY, check_no_run
from petra.runs.run_options import TRAINING
from petra.runs.weight_files import check_weights
from petra.trainer import checkpoint
from petra.trainer.callbacks import Callback
from petra.trainer.loop import TrainingLoop
from petra.trainer.metrics import parse_records

EVERY = 50
"""The default number of updates between two measurements."""


@dataclass(kw_only=True)
class FidelityOptions:
    """How often to measure."""

    every: int | None = option(
        None,
        help="updates between two measurements",
        group=TRAINING,
        metavar="N",
        minimum=1,
        default_text=str(EVERY),
    )


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "fidelity",
        description="Trains a network as `petra train` does. At every N-th update it compares, stage by stage, the "
        "gradient of the method with the exact gradient at the same weights and samples, and with the delayed one: "
        "cosine, norm ratio and σ (the component of the gradient in the exact direction). The measurements do not "
        "change the training. Writes fidelity.jsonl, fidelity.json and fidelity.png into --out, next to the files of "
        "`petra train`; the default folder is runs/fidelity-MODEL-METHOD.",
        epilog="Example: petra fidelity --recipe digits --method petra --stages 6 --every 10 --out runs/fidelity",
    )
    add_run_options(parser, with_method=True)
    add_options(parser, FidelityOptions)
    add_options(parser, FolderOptions)
    add_checkpoint_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Train and measure; print, write and draw the means."""
    check_values(FidelityOptions, vars(options))
    may_change = ("checkpoint_every", "checkpoint_epochs", "keep", "data")
    config, folder = configure(options, may_change, prefix="fidelity-")
    reject_processes("gradients are compared in one process")
    if not (options.resume or options.overwrite):
        check_no_run(folder, "--resume to continue it, --overwrite to replace it")
    if options.resume and (folder / SUMMARY).exists() and not (folder / FIDELITY).exists():
        raise ValueError(f"the run in {folder} has ended without a measurement: give --overwrite to train it again")
    every = _every(options, folder)
    if not options.resume:
        check_weights(config.init_from, folder)
    reject_cuda_graph(options)
    device = set_up_device(options)
    arguments = {"resume": options.resume, "overwrite": options.overwrite, "device": device}
    training = Run(config, folder, **arguments, **reporting(options))
    training.callbacks.append(_HashMeasurements())
    executor = training.trainer.executor
    rows = _read_rows(folder, executor.oldest_in_flight)
    before = "".join(json.dumps(row) + "\n" for row in rows)
    write_files(folder, {FIDELITY: before.encode()})
    if not (folder / FIDELITY_SUMMARY).exists():
        write_files(folder, {FIDELITY_SUMMARY: checkpoint.to_json_bytes({"every": every})})  # read when it is resumed
    with (folder / FIDELITY).open("a") as file:

        def report(measurement: Measurement) -> None:
            row = measurement.row()
            row["epoch"] = round((row["microbatch"] + 1) / len(training.train), 4)
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()

        with Fidelity(executor, every, report):
            summary = training()
    means = summarise(rows)
    names = (
        "method",
        "model",
        "data",
        "stages",
        "schedule",
        "staleness",
        "corrections",
        "accumulate",
        "epochs",
        "seed",
    )
    described = {name: summary[name] for name in names}
    found = {**described, "every": every, "means": means}
    write_files(folder, {FIDELITY_SUMMARY: checkpoint.to_json_bytes(found)})
    sys.stderr.flush()
    if not rows:
        print(f"nothing was measured: the run has fewer than {every} updates, so give a smaller --every")
        return
    print(table(rows, terminal_width()))
    title = f"{config.model}, {config.method}, {len(summary['stages'])} stages"
    drawn = draw(rows, folder / FIDELITY_FIGURE, title)
    count = sum(row["stage"] == "all" for row in rows)
    note = "" if drawn else "; no figure: pip install matplotlib and give --resume to draw it"
    print(f"means of {counted(count, 'update')} of {config.method}; in {folder}{note}")


class _HashMeasurements(Callback):
    """Records the hash of the measurements at every checkpoint."""

    def on_checkpoint(self, loop: TrainingLoop) -> None:
        if loop.folder is not None:
            hash_files(loop.folder, [FIDELITY])


def _every(options: argparse.Namespace, folder: Path) -> int:
    """The updates between two measurements; a resumed run keeps its own."""
    path, remedy = folder / FIDELITY_SUMMARY, "remove it and resume again with --every"
    if not (options.resume and path.exists()):
        return EVERY if options.every is None else int(options.every)
    before = read_json(folder, FIDELITY_SUMMARY, remedy).get("every")
    if not isinstance(before, int):
        raise ValueError(f"{path} is damaged (it has no valid every): {remedy}")
    if options.every not in (None, before):
        raise ValueError(f"the run in {folder} is measured every {before} updates, not {options.every}: leave it out")
    return before


def _read_rows(folder: Path, end: int) -> list[dict[str, Any]]:
    """The measurements of a resumed run for micro-batches before `end`, which had left the pipeline."""
    file, remedy = folder / FIDELITY, "remove it and resume again"
    if not file.exists():
        return []
    content = read_bytes(folder, FIDELITY, remedy)
    whole = content[: content.rfind(b"\n") + 1]  # without a newline: killed while writing
    try:
        return [row for row in parse_records(file, whole, remedy) if row["microbatch"] < end]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}): {remedy}") from error
