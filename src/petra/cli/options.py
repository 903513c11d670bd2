"""Options that several commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from petra.corrections import CORRECTIONS, choose
from petra.execution.job import processes
from petra.methods import METHODS, find
from petra.training.curves import SCHEDULES
from petra.training.optimizers import OPTIMIZERS
from petra.training.recipes import RECIPES


def whole_numbers(text: str) -> int | list[int]:
    """``4`` or ``3,3,2,2``."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, nor several apart by commas") from None
    return numbers if "," in text else numbers[0]


def order_option(text: str) -> str | list[int]:
    """A name, or numbers in flight."""
    if set(text) <= set("0123456789,-"):
        numbers = whole_numbers(text)
        return numbers if isinstance(numbers, list) else [numbers]
    return text


def fractions(text: str) -> tuple[float, ...]:
    """``0.5,0.75``."""
    try:
        return tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of fractions like 0.5,0.75") from None


def correction_names(text: str) -> tuple[str, ...]:
    """``predict,shrink:0.9``, each with its parameter."""
    try:
        return tuple(str(correction) for correction in choose(part for part in text.split(",") if part))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def setting(text: str) -> tuple[str, Any]:
    """``drop_path=0.1``: a name and a number, a list of numbers, true, false or a word."""
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier() and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, like window=4")
    return name, _value(value)


def _value(text: str) -> Any:
    if "," in text:
        return [_value(part) for part in text.split(",") if part]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def add_model_options(what: Any) -> None:
    """The options that change a network; `model_options` reads them."""
    what.add_argument("--width", type=int, help="channels of the first group of blocks, or of a transformer")
    what.add_argument("--depth", type=int, help="blocks of a transformer")
    what.add_argument("--depths", type=whole_numbers, metavar="N,N,…", help="blocks in each group")
    what.add_argument("--heads", type=whole_numbers, metavar="N", help="attention heads, or those of each group")
    what.add_argument("--patch", type=int, help="side of the patches that a vision transformer cuts images into")
    what.add_argument("--dropout", type=float, help="of a transformer")
    what.add_argument("--stem", choices=("cifar", "imagenet"), help="first layer: 3×3, or 7×7 with pooling")
    what.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other argument of the network, like --set window=4; may be given more than once",
    )


def add_run_options(parser: argparse.ArgumentParser, with_method: bool) -> None:
    """The options that make a `RunConfig`; those left out come from the recipe or from the defaults."""
    what = parser.add_argument_group("what to train")
    what.add_argument("--recipe", metavar="NAME", help=f"start from named settings: {', '.join(RECIPES)}")
    what.add_argument("--model", metavar="NAME", help="network to train; `petra models` lists them")
    add_model_options(what)
    what.add_argument(
        "--weights",
        type=lambda text: str(Path(text)),
        metavar="FOLDER",
        help="begin with the weights of an earlier run, or of a .safetensors file, and not with random ones: a new "
        "run, to fine-tune or to train on (--resume continues the same run exactly)",
    )
    what.add_argument(
        "--data",
        metavar="SPEC",
        help="digits, synthetic[:CxHxW:CLASSES], text:FILE (by characters), bytes:FILE, or a folder: CIFAR-10/100 "
        "batches, parquet shards, image folders, or sentences with labels in train.tsv and test.tsv or dev.tsv",
    )
    what.add_argument("--length", type=int, metavar="N", help="tokens in a sample of text (default 256; sentences 64)")
    what.add_argument("--vocab-size", type=int, metavar="N", help="most entries of the vocabulary of sentences (8192)")
    how = parser.add_argument_group("how to train")
    if with_method:
        how.add_argument("--method", metavar="NAME", help=f"one of {', '.join(METHODS)} (default petra)")
    how.add_argument(
        "--stages", type=whole_numbers, metavar="N", help="number of stages, or layers in each like 3,3,2,2 (default 4)"
    )
    how.add_argument(
        "--order",
        type=order_option,
        metavar="NAME",
        help="of pipelined methods: low-staleness (default), lock-step (PETRA's paper), locked-forward (that of "
        "Features Replay), or micro-batches in flight of each stage like 6,4,2,0",
    )
    how.add_argument(
        "--correct",
        dest="corrections",
        type=correction_names,
        metavar="NAME,…",
        help=f"what to do about staleness: {', '.join(CORRECTIONS)}, each with a parameter or not, like "
        "predict,shrink:0.9; `petra corrections` lists them (default: nothing)",
    )
    how.add_argument("--accumulate", type=int, metavar="K", help="micro-batches per update (default 1)")
    how.add_argument("--epochs", type=int, help="passes over the data (default 10)")
    how.add_argument("--batch-size", type=int, metavar="N", help="samples in a micro-batch (default 64)")
    how.add_argument(
        "--drop-last",
        action=argparse.BooleanOptionalAction,
        help="leave out what is left of an epoch after its last whole micro-batch (default: a smaller one)",
    )
    how.add_argument("--optimizer", metavar="NAME", help=f"one of {', '.join(OPTIMIZERS)} (default sgd)")
    how.add_argument(
        "--lr", type=float, help="learning rate (default 0.1 · batch size · K / 256; adamw and nadamw 1e-3)"
    )
    how.add_argument(
        "--momentum", type=float, help="of sgd, or the first beta of adamw and nadamw (default 0.9; nadamw 0.99)"
    )
    how.add_argument(
        "--nesterov",
        action=argparse.BooleanOptionalAction,
        help="whether the momentum of sgd looks ahead (default: yes)",
    )
    how.add_argument("--beta2", type=float, help="the second beta of adamw and nadamw (default 0.999)")
    how.add_argument(
        "--weight-decay", type=float, help="of all but norms, biases and other vectors (5e-4; adamw and nadamw 0.05)"
    )
    how.add_argument(
        "--schedule",
        metavar="NAME",
        help=f"one of {', '.join(SCHEDULES)}: after warm-up, drops of the learning rate (default), or a cosine to zero",
    )
    how.add_argument("--warmup-epochs", type=float, help="epochs of linear warm-up (default 5)")
    how.add_argument("--drops", type=fractions, help="fractions of training after which lr drops ten times")
    how.add_argument("--clip-norm", type=float, help="largest gradient norm of a stage (default: no clipping)")
    how.add_argument("--label-smoothing", type=float, help="share of every target that all classes get (default 0)")
    how.add_argument("--autocast", choices=("bf16",), help="precision of residual functions (default float32)")
    how.add_argument(
        "--exact",
        action="store_const",
        const=True,
        help="reversible layers in fixed point, so that inputs are reconstructed to the last bit",
    )
    how.add_argument(
        "--compile", action="store_const", const=True, help="compile layers and residual functions (torch.compile)"
    )
    how.add_argument(
        "--channels-last",
        action="store_const",
        const=True,
        help="images with their channels together in memory, which convolutions in bf16 on a GPU are fastest with",
    )
    how.add_argument("--messages", choices=("bf16",), help="precision of what travels between stages (default float32)")
    how.add_argument("--seed", type=int, help="of weights, data order and dropout (default 0)")
    where = parser.add_argument_group("where")
    add_device_options(where)
    where.add_argument(
        "--capture",
        action=argparse.BooleanOptionalAction,
        help="record the tick of a full pipeline as a CUDA graph and replay it (default: on a GPU, in one process)",
    )
    where.add_argument(
        "--benchmark",
        action="store_true",
        help="let cuDNN time its algorithms and take the fastest: quicker, but weights may differ from run to run",
    )
    where.add_argument("--tensorboard", action="store_true", help="also write metrics for TensorBoard")
    where.add_argument("--quiet", action="store_true", help="no progress and no notes")


def add_device_options(where: Any) -> None:
    """Where to compute; `set_up_device` reads them."""
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    where.add_argument("--device", default=usual, help="default: a GPU if there is one, so here %(default)s")
    where.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """How often a run is saved; it may be given anew when the run is resumed."""
    parser.add_argument(
        "--checkpoint-every", type=int, metavar="TICKS", help="also write a checkpoint every so many micro-batches"
    )
    parser.add_argument(
        "--checkpoint-epochs",
        type=int,
        metavar="N",
        help="epochs from one checkpoint to the next (default 1); what is in flight can be a gigabyte",
    )


_CONFIG = (
    *("model", "data", "length", "vocab_size", "method", "stages", "order", "accumulate", "epochs", "batch_size"),
    *("drop_last", "clip_norm", "optimizer", "lr", "momentum", "nesterov", "beta2", "weight_decay", "schedule"),
    *("warmup_epochs", "drops", "label_smoothing", "autocast", "exact", "compile", "channels_last", "messages"),
    *("corrections", "seed"),
    *("replicas", "weights", "checkpoint_every", "checkpoint_epochs"),
)
_MODEL = ("width", "depth", "depths", "heads", "patch", "dropout", "stem")


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The options of a `RunConfig` that were given on the command line."""
    found = {name: getattr(options, name, None) for name in _CONFIG}
    result = {name: value for name, value in found.items() if value is not None}
    if model := model_options(options):
        result["model_options"] = model
    return result


def spelled(options: Mapping[str, Any]) -> list[str]:
    """Options of a `RunConfig` as words of a command line, of which `given` makes the same again."""
    words = []
    for name, value in [(n, v) for n, v in options.items() if n != "model_options"]:
        flag = "--correct" if name == "corrections" else f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, _text(value)]
    for name, value in options.get("model_options", {}).items():
        words += [f"--{name}", _text(value)] if name in _MODEL else ["--set", f"{name}={_text(value)}"]
    return words


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(_text(part) for part in value)
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the network that were given on the command line."""
    found = {name: getattr(options, name) for name in _MODEL if getattr(options, name) is not None}
    for name, value in options.set:
        if name in found:
            raise ValueError(f"{name} is given as {found[name]} and as {value}: give it once")
        found[name] = value
    if isinstance(found.get("depths"), int):
        found["depths"] = [found["depths"]]
    return found


def refuse_capture(options: argparse.Namespace, count: int = 1) -> None:
    """Raise ValueError if ticks are to be recorded where they cannot be: by ``count`` processes, or on a CPU."""
    if options.capture and count > 1:
        raise ValueError(f"--capture is for one process, and there are to be {count}: leave --capture out")
    if options.capture and not options.device.startswith("cuda"):
        raise ValueError(
            f"--capture records CUDA graphs, and --device is {options.device}: leave --capture out, or use a GPU"
        )


def refuse_unused(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise ValueError if an order or corrections were given, and none of these methods takes them."""
    found = [find(name) for name in names]
    if options.order is not None and not any(method.pipelined for method in found):
        raise ValueError(
            f"--order is given, but {' and '.join(names)} {'have' if len(names) > 1 else 'has'} one order only: "
            "leave it out, or add a pipelined method such as petra"
        )
    if getattr(options, "corrections", None) and not any(method.stale for method in found):
        raise ValueError(
            f"--correct is given, but {' and '.join(names)} {'have' if len(names) > 1 else 'has'} no staleness to "
            "correct: leave it out, or add a pipelined method such as petra"
        )


def refuse_processes(what: str) -> None:
    """Raise ValueError if torchrun has started several processes, each of which would do the whole of it."""
    if processes() > 1:
        raise ValueError(f"{processes()} processes were started: {what}, so start it without torchrun")


def reporting(options: argparse.Namespace) -> dict[str, Any]:
    """What a `Run` is told that decides nothing about its result."""
    return {"tensorboard": options.tensorboard, "quiet": options.quiet, "capture": options.capture}


def set_up_device(options: argparse.Namespace) -> torch.device:
    """The device that was asked for, or an error if it is not there."""
    if options.threads is None and processes() > 1:
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or processes())
        torch.set_num_threads(max(1, cores() // local))  # ranks share the cores
    if options.threads is not None:
        if not 1 <= options.threads <= 4096:
            raise ValueError(f"--threads is {options.threads}: give 1 or more, at best the number of cores")
        torch.set_num_threads(options.threads)
    try:
        device = torch.device(options.device)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device is {options.device!r}: give cpu, cuda or cuda:0")
    if device.type == "cuda":
        if device.index is None and processes() > 1 and torch.cuda.device_count():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device is {options.device!r}, but that GPU is not here: give cpu or another")
        if device.index is not None:
            torch.cuda.set_device(device)  # nothing is to be done on another, nor memory to be taken there
        benchmark = getattr(options, "benchmark", False)  # for training only
        torch.backends.cudnn.deterministic = not benchmark  # the same options give the same weights
        torch.backends.cudnn.benchmark = benchmark
    return device


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
