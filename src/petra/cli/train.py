"""`petra train`: one run."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from petra.cli.options import add_run_options, given, set_up_device
from petra.tables import mebibytes
from petra.training.config import RunConfig
from petra.training.data import load
from petra.training.run import CONFIG, Run, refuse_to_overwrite, remove_run


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "train",
        help="train a network",
        description="Trains a network with one method; writes metrics, checkpoints, weights and a summary into --out.",
        epilog="Example: petra train --recipe digits --method petra --stages 6 --out runs/digits",
    )
    add_run_options(parser, with_method=True)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the run (default runs/MODEL-METHOD)")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    existing.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    parser.add_argument(
        "--checkpoint-every", type=int, metavar="TICKS", help="also write a checkpoint every so many micro-batches"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Train, and say what came out."""
    config, folder = _configure(options)
    device = set_up_device(options)
    if not (options.resume or options.overwrite):
        refuse_to_overwrite(folder, "--resume to continue it, --overwrite to replace it")
    data = load(config.data, seed=config.seed)
    if options.overwrite:
        remove_run(folder)
    summary = Run(
        config,
        folder,
        resume=options.resume,
        device=device,
        tensorboard=options.tensorboard,
        quiet=options.quiet,
        data=data,
    )()
    print(
        f"{summary['method']} on {len(summary['stages'])} stages ({summary['order']}): "
        f"test accuracy {summary['test_accuracy']:.2%} (best {summary['best_test_accuracy']:.2%} "
        f"in epoch {summary['best_epoch']}), {summary['samples_per_second']:.0f} samples/s, "
        f"peak activations {mebibytes(summary['activation_peak_bytes'])}; in {folder}"
    )


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    """Options by name, those of the model among the others, in the form that JSON gives."""
    flat: dict[str, Any] = {**options.get("model_options", {}), **options}
    flat.pop("model_options", None)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


def _configure(options: argparse.Namespace) -> tuple[RunConfig, Path]:
    """The configuration that was asked for, or on resume that of the run, which has to be the same."""
    if options.resume and options.out is None:
        raise ValueError("--resume needs --out: give the folder of the run to continue")
    asked = given(options)
    written = options.out / CONFIG if options.out is not None else None
    if options.resume and written is not None and written.exists():
        try:
            config = RunConfig.from_json(json.loads(written.read_text()))
            config.validate()
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{written} is damaged ({error}): remove the folder to start anew") from error
        for name, new in _flat(asked).items():
            if name != "checkpoint_every" and (value := _flat(config.to_json()).get(name)) != new:
                raise ValueError(f"the run in {options.out} has {name} {value}, not {new}: leave it out to resume")
        return replace(config, checkpoint_every=asked.get("checkpoint_every", config.checkpoint_every)), options.out
    config = RunConfig.from_options(options.recipe, asked)
    config.validate()
    return config, options.out or Path("runs") / f"{config.model}-{config.method}"
