"""`petra train`: trains a network."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from petra.cli.device import reject_cuda_graph, set_up_device
from petra.cli.options import (
    WHERE,
    FolderOptions,
    add_checkpoint_options,
    add_options,
    add_replicas_option,
    add_run_options,
    given,
    reporting,
)
from petra.data import Data
from petra.distributed import Recovery, Snapshots, Transport, launch_ranks, run_in_job
from petra.distributed.job import ReportedElsewhere, world_size
from petra.distributed.membership import is_replacement
from petra.formatting import counted, mebibytes, parse_bytes
from petra.memory import DoesNotFit
from petra.runs.config import MAY_CHANGE, RunConfig
from petra.runs.dry_run import dry_run
from petra.runs.fit_run import fit_run
from petra.runs.option_fields import check_values, option, whole_numbers
from petra.runs.resume import read_config
from petra.runs.run import Run
from petra.runs.run_folder import CHECKPOINTS, CONFIG, check_no_run, started_by_this_job
from petra.runs.run_options import PROCESSES
from petra.runs.trained_network import vocabulary_files
from petra.runs.weight_files import check_weights
from petra.trainer.checkpoint_folder import LATEST
from petra.trainer.interrupts import Interrupted


@dataclass(kw_only=True)
class ProcessOptions:
    """The processes of a training, and what they write about it."""

    ranks: int | None = option(
        None,
        help="processes that share the stages",
        group=PROCESSES,
        metavar="N",
        minimum=1,
        default_text="1, or those that torchrun has started",
    )
    placement: list[int] | None = option(
        None,
        help="rank of each stage",
        group=PROCESSES,
        metavar="N,N,…",
        parse=whole_numbers,
        default_text="consecutive stages, as many on each rank",
    )
    timeout: float = option(
        300.0,
        help="seconds on one action after which a rank counts as lost",
        group=PROCESSES,
        metavar="SECONDS",
        above=0,
        below=1e8,
    )
    snapshot_every: int = option(
        50,
        help="with --ranks, the most ticks to repeat when a process dies or hangs, and another one takes its place; "
        "with 0, a lost process ends the job",
        group=PROCESSES,
        metavar="TICKS",
        minimum=0,
    )
    replacements: int = option(
        10,
        help="processes that may be started to replace lost ones; after that, other ranks take over their stages",
        group=PROCESSES,
        metavar="N",
        minimum=0,
    )
    spares: int = option(
        0,
        help="idle processes that are ready to replace a lost one",
        group=PROCESSES,
        metavar="N",
        minimum=0,
    )
    from_checkpoint: int | None = option(
        None,
        help="with --resume: continue from this checkpoint, such as 12 for checkpoint/000012, instead of the last one; "
        "newer ones no longer count",
        group=WHERE,
        metavar="N",
        minimum=1,
    )
    dry_run: bool = option(
        False,
        help="print stages, staleness, and predicted memory and time, and do not train",
        group=WHERE,
    )
    memory: int | None = option(
        None,
        help="memory limit: choose the storage of each layer, and smaller micro-batches if necessary, for the fastest "
        "training step that fits; for the methods reversible and pareprop in one process",
        group=WHERE,
        metavar="SIZE",
        parse=parse_bytes,
        default_text="no limit",
    )
    trace: int = option(
        0,
        help="write a timeline of this many ticks (100 if no number is given)",
        group=WHERE,
        metavar="TICKS",
        minimum=0,
        default_text="none",
        keywords={"nargs": "?", "const": 100},
    )


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "train",
        description="Trains a network with one method; writes metrics, checkpoints, weights and a summary into --out.",
        epilog="Example: petra train --recipe digits --method petra --stages 6 --out runs/digits, or "
        "petra train --model rev-gpt --depth 6 --data text:book.txt --optimizer adamw --lr-schedule cosine. "
        "With --init-from runs/digits a new run starts from the weights of that one. "
        "With --ranks 2 it runs on two processes of this machine; torchrun starts it on several machines.",
    )
    add_run_options(parser, with_method=True)
    add_options(parser, FolderOptions)
    add_checkpoint_options(parser)
    add_options(parser, ProcessOptions)
    add_replicas_option(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train, and print the result."""
    check_values(ProcessOptions, vars(options))
    if options.from_checkpoint is not None and not options.resume:
        raise ValueError(f"--from-checkpoint is {options.from_checkpoint} without --resume: give --resume, too")
    if not options.resume:
        asked = given(options)  # --config may set the recipe
        folder = options.out or _default_folder(RunConfig.from_options(options.recipe, asked))
        if started_by_this_job(folder):  # torchrun has restarted it
            options.resume, options.overwrite, options.out = True, False, folder
    elif options.out is not None and started_by_this_job(options.out):
        options.from_checkpoint = None  # it has continued from there already
    config, folder = configure(options)
    ranks = _ranks(options, config)
    if options.dry_run:
        print(dry_run(config, set_up_device(options), ranks=ranks, placement=options.placement).report())
        return 0
    if not is_replacement():
        if not (options.resume or options.overwrite):
            check_no_run(folder, "--resume to continue it, --overwrite to replace it")
        if not options.resume:
            check_weights(config.init_from, folder)
    reject_cuda_graph(options)
    if options.memory is not None:
        _check_memory(options, ranks * config.replicas)
    if world_size() == 1 and ranks * config.replicas > 1:
        recovery = Recovery(options.replacements, options.spares) if options.snapshot_every else None
        processes = ranks * config.replicas
        return launch_ranks(options.arguments, processes, options.module, replicas=config.replicas, recovery=recovery)
    device = set_up_device(options)
    data: list[Data] = []

    if options.memory is not None:
        config = _fit(options, config, device, data)

    def load_data() -> None:
        data.append(config.load_data())

    def prepare() -> None:
        load_data()
        torch.optim.SGD([torch.zeros(1)]).step()  # imports what the first optimizer imports, which takes seconds

    def train(transport: Transport, snapshots: Snapshots | None) -> dict[str, Any] | None:
        position = transport.position
        if not data:
            load_data()
        training = Run(
            config,
            folder,
            resume=options.resume,
            from_checkpoint=options.from_checkpoint,
            overwrite=options.overwrite,
            device=device,
            data=data[0],
            transport=transport,
            placement=options.placement if position.ranks == ranks else None,
            trace=options.trace,
            snapshots=snapshots,
            **reporting(options),
        )
        try:
            summary = training()
        except Interrupted:
            if not position.is_main:
                raise ReportedElsewhere(130) from None
            raise
        return summary if position.is_main else None

    summary = run_in_job(
        train,
        device,
        replicas=config.replicas,
        timeout=options.timeout,
        early_exit=(Interrupted, ReportedElsewhere),
        snapshot_every=options.snapshot_every,
        prepare=prepare if is_replacement() else None,
    )
    if summary is not None:
        print(f"{_result(summary)}; in {folder}")
    return 0


def _check_memory(options: argparse.Namespace, processes: int) -> None:
    if max(processes, world_size()) > 1:
        raise ValueError("--memory is for one process: leave it out, or train with --ranks 1")
    if options.cuda_graph:
        raise ValueError("--memory does not count the memory of captured ticks: leave out --memory or --cuda-graph")


def _fit(options: argparse.Namespace, config: RunConfig, device: torch.device, data: list[Data]) -> RunConfig:
    """Return the configuration that fits into `--memory`, and print why."""
    options.cuda_graph = False  # a captured tick keeps memory that would not be counted
    data.append(config.load_data())
    files = vocabulary_files(data[0])
    split = not options.resume
    try:
        config, plan = fit_run(config, options.memory, device, data[0], files, split=split, quiet=options.quiet)
    except DoesNotFit as error:
        hint = f", or more --stages than {config.stages}, because gradients are freed stage by stage"
        raise DoesNotFit(
            f"{error}{hint if config.accumulate == 1 and isinstance(config.stages, int) else ''}"
        ) from error
    if not options.quiet:
        print(plan, file=sys.stderr)
    return config


def _result(summary: dict[str, Any]) -> str:
    """The result of a run in one line."""
    corrections = "".join(f" + {name}" for name in summary["corrections"])
    where = f" and {summary['ranks']} ranks" if summary["ranks"] > 1 else ""
    where += f" in {summary['replicas']} replicas" if summary["replicas"] > 1 else ""
    bits = f" ({summary['bits_per_byte']:.4f} bits per byte)" if "bits_per_byte" in summary else ""
    return (
        f"{summary['method']}{corrections} on {counted(len(summary['stages']), 'stage')}{where} "
        f"({summary['schedule']}): test accuracy {summary['test_accuracy']:.2%} "
        f"(best {summary['best_test_accuracy']:.2%} in epoch {summary['best_epoch']}), "
        f"test loss {summary['test_loss']:.4f}{bits}, {summary['samples_per_second']:.0f} samples/s, "
        f"peak activations {mebibytes(summary['activation_peak_bytes'])}"
    )


def _ranks(options: argparse.Namespace, config: RunConfig) -> int:
    """The number of ranks, which has to match the processes that torchrun has started."""
    if isinstance(options.placement, int):
        options.placement = [options.placement]
    asked = options.ranks
    if asked is None and options.placement:
        asked = max(options.placement) + 1
    started = world_size()
    if started > 1:
        if started % config.replicas:
            raise ValueError(
                f"--replicas is {config.replicas}, but there are {started} processes: give a divisor of {started}"
            )
        if asked is not None and asked * config.replicas != started:
            raise ValueError(f"--ranks is {asked}, but {started // config.replicas} were started: leave it out")
        return started // config.replicas
    ranks = asked or 1
    stages = config.stages if isinstance(config.stages, int) else len(config.stages)
    if ranks > stages:
        raise ValueError(f"--ranks is {ranks} for {stages} stages: give at most {stages}, or more --stages")
    return ranks


def configure(
    options: argparse.Namespace, may_change: Sequence[str] = MAY_CHANGE, prefix: str = ""
) -> tuple[RunConfig, Path]:
    """Build the configuration of a run, or read it from the run to resume; given options must match it.

    Args:
        options: The parsed command line.
        may_change: The options that may differ on resume.
        prefix: What the name of the default folder starts with.

    Returns:
        The configuration and the folder of the run.

    Raises:
        ValueError: If the options are not valid, or differ from those of the run to resume.
    """
    if options.resume and options.out is None:
        raise ValueError("--resume needs --out: give the folder of the run to continue")
    asked = given(options)
    written = options.out / CONFIG if options.out is not None else None
    if options.resume and written is not None and (written.exists() or (options.out / CHECKPOINTS / LATEST).exists()):
        config, warning = read_config(options.out)
        if warning is not None and world_size() == 1:  # with --ranks, the process that starts them
            print(f"warning: {warning}", file=sys.stderr)
        before = _flat(config.to_json())
        for name, value in _flat(asked).items():
            if name not in may_change and before.get(name) != value:
                shown = "its default" if before.get(name) is None else before[name]
                raise ValueError(f"the run in {options.out} has {name} {shown}, not {value}: leave it out to resume")
        config = replace(config, **{name: asked[name] for name in may_change if name in asked})
        config.validate()
        return config, options.out
    if options.resume and not {"model", "data"} & asked.keys() and options.recipe is None:
        raise ValueError(f"{options.out} holds no run to resume: give the folder of one, or what to train there")
    config = RunConfig.from_options(options.recipe, asked)
    config.validate()
    return config, options.out or _default_folder(config, prefix)


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    """Options by name, those of the network among the others, as JSON values."""
    flat: dict[str, Any] = {**options.get("model_options", {}), **options}
    flat.pop("model_options", None)
    flat |= {f"optimizer {name}": value for name, value in (flat.pop("optimizer_options", None) or {}).items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


def _default_folder(config: RunConfig, prefix: str = "") -> Path:
    return Path("runs") / f"{prefix}{config.model.replace(':', '-')}-{config.method}"
