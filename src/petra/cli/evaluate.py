"""`petra evaluate`: the network of a finished run on test data."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from petra.cli.options import add_device_options, set_up_device
from petra.training.evaluation import evaluate_run


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "evaluate",
        help="test the network of a run",
        description="Prints test loss and accuracy of the network that a run has trained, on the test part of its data "
        "or of other data of the same kind, which is normalised, or spelled with the vocabulary, as in training.",
        epilog="Example: petra evaluate runs/digits --json",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of `petra train`")
    parser.add_argument("--data", metavar="SPEC", help="other data, as for `petra train` (default: that of the run)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples at once (default: as in the run)")
    parser.add_argument(
        "--autocast", choices=("bf16", "float32"), help="precision of residual functions (default: that of the run)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_device_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Evaluate, and print what came out."""
    if options.batch_size is not None and options.batch_size < 1:
        raise ValueError(f"--batch-size is {options.batch_size}: give 1 or more")
    device = set_up_device(options)
    score = evaluate_run(
        options.folder, data=options.data, device=device, batch_size=options.batch_size, autocast=options.autocast
    )
    if options.json:
        print(json.dumps({"folder": str(options.folder), **asdict(score)}))
        return
    print(
        f"{score.model} on {score.data}: test accuracy {score.test_accuracy:.2%}, test loss {score.test_loss:.4f} "
        f"({score.samples} {score.unit})"
    )
