"""`petra train`: one run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from petra.cli.launch import launch
from petra.cli.options import (
    add_checkpoint_options,
    add_run_options,
    given,
    refuse_capture,
    reporting,
    set_up_device,
    whole_numbers,
)
from petra.execution.job import Spoken, join, processes
from petra.names import counted
from petra.tables import mebibytes
from petra.training.config import MAY_CHANGE, RunConfig
from petra.training.faults import Fault, fail_at
from petra.training.files import CONFIG, begun_by_this_job, refuse_to_overwrite
from petra.training.run import Interrupted, Run
from petra.training.weights import check_weights


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "train",
        help="train a network",
        description="Trains a network with one method; writes metrics, checkpoints, weights and a summary into --out.",
        epilog="Example: petra train --recipe digits --method petra --stages 6 --out runs/digits, or "
        "petra train --model rev-gpt --depth 6 --data text:book.txt --optimizer adamw --schedule cosine. "
        "With --weights runs/digits a new run begins where that one has ended. "
        "With --ranks 2 it runs on two processes of this machine; torchrun starts it on several machines.",
    )
    add_run_options(parser, with_method=True)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the run (default runs/MODEL-METHOD)")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    existing.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    add_checkpoint_options(parser)
    many = parser.add_argument_group("on several processes")
    many.add_argument("--ranks", type=int, metavar="N", help="processes that share the stages (default 1)")
    many.add_argument(
        "--placement",
        type=whole_numbers,
        metavar="N,N,…",
        help="rank of each stage (default: as many on each, in a row)",
    )
    many.add_argument(
        "--replicas", type=int, metavar="R", help="copies of the pipeline that share each batch (default 1)"
    )
    many.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="of a rank that is stuck (default %(default)g)"
    )
    parser.add_argument(
        "--trace", type=int, nargs="?", const=100, default=0, metavar="TICKS", help="write a timeline (of 100 ticks)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train, and say what came out."""
    if not options.resume:
        folder = options.out or _default_folder(RunConfig.from_options(options.recipe, given(options)))
        if begun_by_this_job(folder):  # torchrun starts it anew
            options.resume, options.overwrite, options.out = True, False, folder
    config, folder = configure(options)
    if not 0 < options.timeout < 1e8:
        raise ValueError(f"--timeout is {options.timeout}: give seconds")
    if options.trace < 0:
        raise ValueError(f"--trace is {options.trace}: give a number of ticks")
    ranks = _ranks(options, config)
    if not (options.resume or options.overwrite):
        refuse_to_overwrite(folder, "--resume to continue it, --overwrite to replace it")
    if not options.resume:
        check_weights(config.weights, folder)
    refuse_capture(options, ranks * config.replicas)
    if processes() == 1 and ranks * config.replicas > 1:
        return launch(options.arguments, ranks * config.replicas)
    device = set_up_device(options)
    with join(device, replicas=config.replicas, timeout=options.timeout, orderly=(Interrupted, Spoken)) as transport:
        job = Run(
            config,
            folder,
            resume=options.resume,
            overwrite=options.overwrite,
            device=device,
            transport=transport,
            placement=options.placement,
            trace=options.trace,
            **reporting(options),
        )
        if fault := Fault.from_environment():
            fail_at(job.trainer, fault)
        try:
            summary = job()
        except Interrupted:
            if not transport.place.speaks:
                raise Spoken(130) from None
            raise
    if transport.place.speaks:
        on = f" and {summary['ranks']} ranks" if summary["ranks"] > 1 else ""
        corrected = "".join(f" + {name}" for name in summary.get("corrections", []))
        on += f" in {summary['replicas']} replicas" if summary["replicas"] > 1 else ""
        print(
            f"{summary['method']}{corrected} on {counted(len(summary['stages']), 'stage')}{on} ({summary['order']}): "
            f"test accuracy {summary['test_accuracy']:.2%} (best {summary['best_test_accuracy']:.2%} "
            f"in epoch {summary['best_epoch']}), test loss {summary['test_loss']:.4f}, "
            f"{summary['samples_per_second']:.0f} samples/s, "
            f"peak activations {mebibytes(summary['activation_peak_bytes'])}; in {folder}"
        )
    return 0


def _ranks(options: argparse.Namespace, config: RunConfig) -> int:
    """How many ranks there are to be, which has to fit how many processes there are already."""
    if isinstance(options.placement, int):
        options.placement = [options.placement]
    asked = options.ranks
    if asked is None and options.placement:
        asked = max(options.placement) + 1
    if asked is not None and asked < 1:
        raise ValueError(f"--ranks is {asked}: give 1 or more")
    started = processes()
    if started > 1:
        if started % config.replicas:
            raise ValueError(f"--replicas is {config.replicas}, which does not divide the {started} processes")
        if asked is not None and asked * config.replicas != started:
            raise ValueError(f"--ranks is {asked}, but {started // config.replicas} were started: leave it out")
        return started // config.replicas
    ranks = asked or 1
    stages = config.stages if isinstance(config.stages, int) else len(config.stages)
    if ranks > stages:
        raise ValueError(f"--ranks is {ranks} for {stages} stages: give at most {stages}, or more --stages")
    return ranks


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    """Options by name, those of the model among the others, in the form that JSON gives."""
    flat: dict[str, Any] = {**options.get("model_options", {}), **options}
    flat.pop("model_options", None)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


def configure(
    options: argparse.Namespace, may_change: Sequence[str] = MAY_CHANGE, kind: str = ""
) -> tuple[RunConfig, Path]:
    """The configuration that was asked for, or on resume that of the run, which has to be the same.

    And the folder of the run; ``kind`` goes into its name if none was given.
    """
    if options.resume and options.out is None:
        raise ValueError("--resume needs --out: give the folder of the run to continue")
    asked = given(options)
    written = options.out / CONFIG if options.out is not None else None
    if options.resume and written is not None and written.exists():
        config = RunConfig.read(written)
        for name, new in _flat(asked).items():
            if name not in may_change and (value := _flat(config.to_json()).get(name)) != new:
                has = "its default" if value is None else value
                raise ValueError(f"the run in {options.out} has {name} {has}, not {new}: leave it out to resume")
        config = replace(config, **{name: asked[name] for name in may_change if name in asked})
        config.validate()
        return config, options.out
    if options.resume and not {"model", "data"} & asked.keys() and options.recipe is None:
        raise ValueError(f"{options.out} holds no run to resume: give the folder of one, or say what to train there")
    config = RunConfig.from_options(options.recipe, asked)
    config.validate()
    return config, options.out or _default_folder(config, kind)


def _default_folder(config: RunConfig, kind: str = "") -> Path:
    return Path("runs") / f"{kind}{config.model}-{config.method}"
