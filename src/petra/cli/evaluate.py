"""`petra evaluate`: tests the network of a finished run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from petra.cli.device import set_up_device
from petra.cli.options import DeviceOptions, add_options
from petra.runs.option_fields import check_values, like, option
from petra.runs.run_evaluation import evaluate_run
from petra.runs.run_options import RunOptions


@dataclass(kw_only=True)
class EvaluateOptions(DeviceOptions):
    """The options of `petra evaluate`."""

    folder: Path = option(help="folder of `petra train`", metavar="FOLDER", positional=True)
    data: str | None = like(
        RunOptions,
        "data",
        default=None,
        help="other data, as for `petra train`",
        group=None,
        default_text="that of the run",
    )
    batch_size: int | None = like(
        RunOptions, "batch_size", default=None, help="samples in a batch", group=None, default_text="as in the run"
    )
    autocast: str | None = like(
        RunOptions, "autocast", group=None, choices=("bf16", "float32"), default_text="that of the run"
    )
    weights: str = option(
        "last",
        help="weights of the end, of the best evaluation, or averaged (--ema)",
        choices=("last", "best", "ema"),
    )
    json: bool = option(False, help="print JSON")


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "evaluate",
        description="Prints test loss and accuracy of the network that a run has trained, on the test part of its data "
        "or of other data of the same kind, which is normalised or encoded as in training.",
        epilog="Example: petra evaluate runs/digits --json",
    )
    add_options(parser, EvaluateOptions)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Evaluate, and print the result."""
    check_values(EvaluateOptions, vars(options))
    device = set_up_device(options)
    score = evaluate_run(
        options.folder,
        data=options.data,
        device=device,
        batch_size=options.batch_size,
        autocast=options.autocast,
        weights=options.weights,
    )
    if options.json:
        found = {name: value for name, value in asdict(score).items() if value is not None}
        print(json.dumps({"folder": str(options.folder), **found}))
        return
    bits = "" if score.bits_per_byte is None else f", {score.bits_per_byte:.4f} bits per byte"
    print(
        f"{score.model} on {score.data}: test accuracy {score.test_accuracy:.2%}, "
        f"test loss {score.test_loss:.4f}{bits} ({score.samples} {score.unit})"
    )
