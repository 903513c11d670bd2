"""The command-line options that commands share, generated from dataclass fields.

`petra.runs.option_fields` defines the metadata of a field. The argparse options are generated here, because tyro and
jsonargparse, which also turn dataclasses into options, do not give one-line errors with limits and suggestions.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from petra.cli.config_file import read_config_file
from petra.cli.device import set_up_device
from petra.methods import find
from petra.runs.config import RunConfig
from petra.runs.option_fields import (
    check_values,
    flag_of,
    option,
    options_of,
    parser_of,
    schedule_option,
    setting,
    spell,
    value_type,
    whole_numbers,
)
from petra.runs.recipes import RECIPES
from petra.runs.run_options import CHECKPOINTS, MODEL, PROCESSES, TRAINING
from petra.schedule import find_schedule
from petra.trainer.loggers import LOGGERS, make_logger
from petra.trainer.schedules import accepts

__all__ = [
    "add_checkpoint_options",
    "add_options",
    "add_run_options",
    "given",
    "model_options",
    "schedule_option",
    "set_up_device",
    "spell_options",
]

WHERE = "device and output"


@dataclass(kw_only=True)
class RecipeOption:
    """Where a `RunConfig` starts from."""

    recipe: str | None = option(
        None,
        help=f"start from named settings, which other options override: {', '.join(RECIPES)}",
        group=MODEL,
        metavar="NAME",
        default_text="none",
    )


@dataclass(kw_only=True)
class ConfigFileOption:
    """A file with options."""

    config: Path | None = option(
        None,
        help="options from a .yaml, .toml or .json file, such as the config.json of a run; those on the command line "
        "override them",
        group=MODEL,
        metavar="FILE",
        default_text="none",
    )


@dataclass(kw_only=True)
class NetworkOptions:
    """Arguments of the network."""

    width: int | None = option(
        None, help="channels of the first group of blocks, or of a transformer", group=MODEL, metavar="N"
    )
    depth: int | None = option(None, help="blocks of a transformer", group=MODEL, metavar="N")
    depths: list[int] | None = option(
        None, help="blocks in each group", group=MODEL, metavar="N,N,…", parse=whole_numbers
    )
    heads: int | list[int] | None = option(
        None, help="attention heads, or those of each group", group=MODEL, metavar="N", parse=whole_numbers
    )
    patch: int | None = option(None, help="side of the patches of a vision transformer", group=MODEL, metavar="N")
    dropout: float | None = option(None, help="dropout of a transformer", group=MODEL)
    stem: str | None = option(
        None, help="first layer: 3×3, or 7×7 with pooling", group=MODEL, choices=("cifar", "imagenet")
    )
    set: list[tuple[str, Any]] | None = option(
        None,
        help="any other argument of the network, like --set window=4; may be given more than once",
        group=MODEL,
        metavar="NAME=VALUE",
        parse=setting,
        keywords={"action": "append"},
    )


@dataclass(kw_only=True)
class OptimizerOptions:
    """Arguments of the optimizer."""

    set_optimizer: list[tuple[str, Any]] | None = option(
        None,
        help="an argument of an optimizer of torch.optim or of your own, like --set-optimizer alpha=0.9; may be given "
        "more than once",
        group=TRAINING,
        metavar="NAME=VALUE",
        parse=setting,
        keywords={"action": "append"},
    )


@dataclass(kw_only=True)
class DeviceOptions:
    """Where to compute; `set_up_device` reads them."""

    device: str | None = option(
        None,
        help="cpu, cuda or cuda:0",
        group=WHERE,
        metavar="NAME",
        default_text="a GPU if there is one",
    )
    threads: int | None = option(
        None, help="CPU threads", group=WHERE, metavar="N", minimum=1, maximum=4096, default_text="all cores"
    )


@dataclass(kw_only=True)
class ExecutionOptions(DeviceOptions):
    """How to run a training; none of them decides its result, except for `cudnn_benchmark`."""

    cuda_graph: bool | None = option(
        None,
        help="capture the tick of a full pipeline as a CUDA graph",
        group=WHERE,
        default_text="on a GPU, in one process",
    )
    cudnn_benchmark: bool = option(
        False,
        help="let cuDNN time its algorithms and choose the fastest: faster, but weights may differ between runs",
        group=WHERE,
    )
    tensorboard: bool = option(False, help="also write metrics for TensorBoard", group=WHERE)
    logger: tuple[str, ...] = option(
        (),
        help="also send metrics to these tools",
        group=WHERE,
        metavar="NAME",
        choices=tuple(LOGGERS),
        parse=str,
        default_text="none",
        keywords={"nargs": "+"},
    )
    quiet: bool = option(False, help="print no progress and no notes", group=WHERE)


@dataclass(kw_only=True)
class FolderOptions:
    """The folder of a run, and what to do with a run that is in it already."""

    out: Path | None = option(
        None, help="folder of the run", group=WHERE, metavar="FOLDER", default_text="runs/MODEL-METHOD"
    )
    resume: bool = option(
        False, help="continue the run in --out from its last checkpoint", group=WHERE, exclusive="existing run"
    )
    overwrite: bool = option(False, help="replace the run in --out", group=WHERE, exclusive="existing run")


def add_options(parser: argparse.ArgumentParser, config: type, names: Collection[str] | None = None) -> None:
    """Add the fields of a dataclass to a parser.

    Options of a `RunConfig` are None if they are not given, because a recipe may set them; others have their defaults.

    Args:
        parser: The parser of a command.
        config: The dataclass.
        names: The fields to add; None means all.
    """
    exclusive: dict[str, Any] = {}
    for name, (field, described) in options_of(config).items():
        if names is not None and name not in names:
            continue
        keywords: dict[str, Any] = dict(described.keywords)
        optional, boolean = config is RunConfig, value_type(config, name) is bool
        if boolean and (optional or field.default is None):
            keywords |= {"action": argparse.BooleanOptionalAction, "default": None}
        elif boolean:
            keywords |= {"action": "store_true"}
        else:
            keywords |= {"type": parser_of(config, name), "metavar": described.metavar or "X"}
            if not described.positional and not optional:
                keywords |= {"required": True} if field.default is MISSING else {"default": field.default}
            if described.choices:
                keywords |= {"choices": described.choices}
                if described.metavar is None:
                    del keywords["metavar"]
        default = _default_text(field.default, described.default_text)
        text = (
            f"{described.help}: {', '.join(described.choices)}"
            if "choices" in keywords and described.metavar
            else described.help
        )
        where: Any = _group(parser, described.group)
        if described.exclusive:
            if described.exclusive not in exclusive:
                exclusive[described.exclusive] = where.add_mutually_exclusive_group()
            where = exclusive[described.exclusive]
        action = where.add_argument(
            name if described.positional else flag_of(name, described),
            help=f"{text} (default: {default})".replace("%", "%%") if default else text.replace("%", "%%"),
            **({} if described.positional else {"dest": name}),
            **keywords,
        )
        action.option, action.default_text = described, default


def _default_text(default: Any, text: str) -> str:
    """The default in words; empty if the help needs none."""
    if text or default is MISSING or default is None or default is False or default in ("", ()):
        return text
    return spell(default)


def _group(parser: argparse.ArgumentParser, title: str | None) -> Any:
    """The group with this title, which several dataclasses may add to."""
    if title is None:
        return parser
    found = [group for group in parser._action_groups if group.title == title]
    return found[0] if found else parser.add_argument_group(title)


def add_run_options(parser: argparse.ArgumentParser, with_method: bool) -> None:
    """Add the options of a `RunConfig` and those that say where to run it.

    Args:
        parser: The parser of a command.
        with_method: Whether there is a `--method`.
    """
    groups = {name: described.group for name, (_, described) in options_of(RunConfig).items()}
    names = [name for name, group in groups.items() if group == MODEL]
    add_options(parser, RecipeOption)
    add_options(parser, ConfigFileOption)
    add_options(parser, RunConfig, names[:1])
    add_options(parser, NetworkOptions)
    add_options(parser, RunConfig, names[1:])
    training = [name for name, group in groups.items() if group == TRAINING and (with_method or name != "method")]
    position = training.index("optimizer") + 1
    add_options(parser, RunConfig, training[:position])
    add_options(parser, OptimizerOptions)
    add_options(parser, RunConfig, training[position:])
    add_options(parser, ExecutionOptions)


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how often a run is saved."""
    add_options(parser, RunConfig, [n for n, (_, o) in options_of(RunConfig).items() if o.group == CHECKPOINTS])


def add_replicas_option(parser: argparse.ArgumentParser) -> None:
    """Add `--replicas`."""
    add_options(parser, RunConfig, [n for n, (_, o) in options_of(RunConfig).items() if o.group == PROCESSES])


def given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a `RunConfig` that were given on the command line.

    Args:
        options: The parsed command line.

    Returns:
        Values by field name, for `RunConfig.from_options`.

    Raises:
        ValueError: If an option of any dataclass here is outside its limits.
    """
    check_values(ExecutionOptions, vars(options))
    found = {name: getattr(options, name, None) for name in options_of(RunConfig)}
    result = {name: value for name, value in found.items() if value is not None}
    if getattr(options, "set_optimizer", None):
        result["optimizer_options"] = dict(options.set_optimizer)
    if arguments := model_options(options):
        result["model_options"] = arguments
    return _with_config_file(options, result) if getattr(options, "config", None) else result


def _with_config_file(options: argparse.Namespace, result: dict[str, Any]) -> dict[str, Any]:
    """Return the options of --config, overridden by those of the command line."""
    recipe, found = read_config_file(options.config, set(options_of(NetworkOptions)) - {"set"}, set(vars(options)))
    options.recipe = options.recipe or recipe
    for name in ("model_options", "optimizer_options"):
        if name in found and name in result:
            result[name] = {**found[name], **result[name]}
    return {**found, **result}


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the network that were given on the command line."""
    found = {name: getattr(options, name) for name in options_of(NetworkOptions) if name != "set"}
    found = {name: value for name, value in found.items() if value is not None}
    for name, value in options.set or ():
        if name in found:
            raise ValueError(f"{name} is given as {found[name]} and as {value}: give it once")
        found[name] = value
    if isinstance(found.get("depths"), int):
        found["depths"] = [found["depths"]]
    return found


def spell_options(options: Mapping[str, Any]) -> list[str]:
    """Return options of a `RunConfig` as arguments of a command line, from which `given` returns the same options."""
    words = []
    for name, (_, described) in options_of(RunConfig).items():
        if name in options:
            flag, value = flag_of(name, described), options[name]
            if isinstance(value, bool):
                words.append(flag if value else flag.replace("--", "--no-", 1))
            else:
                words += [flag, spell(value)]
    known = options_of(NetworkOptions)
    for name, value in options.get("model_options", {}).items():
        words += [flag_of(name), spell(value)] if name in known else ["--set", f"{name}={spell(value)}"]
    for name, value in options.get("optimizer_options", {}).items():
        words += ["--set-optimizer", f"{name}={spell(value)}"]
    return words


def reject_unused(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise ValueError if a schedule or corrections were given, and none of these methods takes them."""
    found, verb = [find(name) for name in names], "have" if len(names) > 1 else "has"
    if options.schedule is not None and not any(accepts(method, options.schedule) for method in found):
        schedule = find_schedule(options.schedule, 4) if isinstance(options.schedule, str) else None
        raise ValueError(
            f"--schedule is {spell(options.schedule)}, which {' and '.join(names)} cannot use: leave it out, "
            + ("" if schedule is not None and schedule.exact else "choose gpipe, 1f1b or interleaved, ")
            + "or add a pipelined method such as petra"
        )
    if getattr(options, "corrections", None) and not any(method.stale for method in found):
        raise ValueError(
            f"--corrections is given, but {' and '.join(names)} {verb} no staleness to correct: "
            "leave it out, or add a pipelined method such as petra"
        )


def reporting(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a `Run` that do not decide its result."""
    names = dict.fromkeys(["tensorboard"] * options.tensorboard + list(options.logger or ()))
    callbacks = [make_logger(name) for name in names]
    return {"callbacks": callbacks, "quiet": options.quiet, "cuda_graph": options.cuda_graph}
