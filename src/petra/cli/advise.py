"""`petra advise`: recommends a method, a schedule, k and a learning rate for a network and some devices."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from petra.cli.options import NetworkOptions, RecipeOption, add_options, model_options, spell_options
from petra.cli.plan_config import InputOptions, PlanConfig
from petra.data import load_data
from petra.formatting import counted, render
from petra.measure.memory_estimate import MemoryEstimator
from petra.methods import find as find_method
from petra.pipeline import partition
from petra.reversible import ReversibleLayer
from petra.runs import recipes
from petra.runs.advice import KINDS, Choice, Situation, choices
from petra.runs.option_fields import check_values, like, option, options_of
from petra.runs.run_options import MODEL, TRAINING, RunOptions
from petra.trainer.loss import cross_entropy
from petra.trainer.stability import is_transformer

_HARDWARE = "hardware"


@dataclass(kw_only=True)
class AdviseOptions:
    """The options of `petra advise`."""

    model: str | None = like(InputOptions, "model", default=None, default_text="a network of your own, of --kind")
    kind: str | None = option(
        None, help="what a network of your own is", group=MODEL, choices=KINDS, default_text="that of --model"
    )
    data: str | None = like(
        RunOptions, "data", default=None, default_text="unknown: give --image or --seq-len for the memory"
    )
    image: tuple[int, int, int] | None = like(InputOptions, "image")
    classes: int = like(InputOptions, "classes")
    seq_len: int | None = like(InputOptions, "seq_len")
    vocab_size: int | None = like(InputOptions, "vocab_size")
    devices: int = option(1, help="number of GPUs, or of processes", group=_HARDWARE, metavar="N", minimum=1)
    memory: float | None = option(
        None, help="memory of a device", group=_HARDWARE, metavar="GiB", above=0, below=1e9, default_text="no limit"
    )
    batch_size: int | None = like(RunOptions, "batch_size", default=None, default_text="that of the recipe, or 64")
    epochs: int | None = like(RunOptions, "epochs", default=None, default_text="that of the recipe, or 10")
    max_accumulate: int | None = option(
        None,
        help="largest number of micro-batches per update",
        group=TRAINING,
        metavar="K",
        minimum=1,
        default_text="no limit",
    )


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "advise",
        description="Recommends a method, a schedule, the number k of micro-batches per update and a learning rate, "
        "with reasons and the command to run. Memory is counted on the meta device, where nothing is computed, in "
        "float32 and for stages of equal numbers of layers.",
        epilog="Example: petra advise --model revnet50 --image 3x224x224 --devices 4 --memory 16, or "
        "petra advise --kind transformer --devices 8 for a network of your own.",
    )
    add_options(parser, RecipeOption)
    add_options(parser, AdviseOptions, ["model", "kind"])
    add_options(parser, NetworkOptions)
    add_options(parser, AdviseOptions, options_of(AdviseOptions).keys() - {"model", "kind"})
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print a table of choices, reasons and a command."""
    check_values(AdviseOptions, vars(options))
    recipe = recipes.find(options.recipe).options if options.recipe else {}
    options.model = options.model or recipe.get("model")
    batch_size = options.batch_size or recipe.get("batch_size", 64)
    epochs = options.epochs or recipe.get("epochs", 10)
    if options.model is None and options.kind is None:
        raise ValueError("--model is missing: give it, or --recipe, or --kind for a network of your own")
    if options.model is None:
        situation = Situation(
            options.kind, True, options.devices, None, batch_size, max_accumulate=options.max_accumulate
        )
        found = choices(situation)
        print(report(found, [None] * len(found), None))
        print(f"\nfor a network with reversible layers:\n\n{_call(found[0])}")
        return
    given = {**(recipe.get("model_options", {}) if options.model == recipe.get("model") else {})}
    given |= model_options(options)
    samples = _read_data(options, recipe)
    config = _plan_config(options, given, batch_size)
    with torch.device("meta"):
        network = config.network()
    situation = Situation(
        options.kind or ("transformer" if is_transformer(network) else "convolutional"),
        any(isinstance(layer, ReversibleLayer) for layer in network),
        options.devices,
        len(network),
        batch_size,
        None if samples is None else max(1, samples // batch_size) * epochs,
        options.max_accumulate,
        config.image is None,
    )
    found = [_as_in_recipe(choice, recipe) for choice in choices(situation)]
    memory = [estimate(config, network, choice) for choice in found]
    limit = None if options.memory is None else int(options.memory * 2**30)
    while limit is not None and min(memory) > limit and found[-1].batch_size > 1:
        found = [_halved(choice) for choice in found]
        memory = [estimate(config, network, choice) for choice in found]
    print(
        f"{options.model}, {situation.kind}, {counted(len(network), 'layer')}; {counted(options.devices, 'device')}\n"
    )
    print(report(found, memory, limit))
    best = found[recommended(memory, limit)]
    own = {"epochs": epochs} if options.epochs or not recipe else {}
    if options.recipe is None:
        own |= {"model": options.model, "model_options": given}
    words = ["petra", "train", *(["--recipe", options.recipe] if options.recipe else [])]
    own |= {"batch_size": batch_size, **best.options()}
    defaults = {name: field.default for name, (field, _) in options_of(RunOptions).items()} | recipe
    own = {name: value for name, value in own.items() if name not in defaults or value != defaults[name]}
    words += spell_options({**own, "data": options.data or "DATA"})
    words += ["--ranks", str(best.devices)] if best.devices > 1 else []
    print(f"\n    {shlex.join(words)}")


def recommended(memory: Sequence[int | None], limit: int | None) -> int:
    """Return the index of the first choice that fits, or of the smallest one if none does."""
    for index, needed in enumerate(memory):
        if limit is None or needed is None or needed <= limit:
            return index
    return min(range(len(memory)), key=lambda index: memory[index] or 0)


def report(found: Sequence[Choice], memory: Sequence[int | None], limit: int | None) -> str:
    """Return the table of choices, and the reasons for the recommended one.

    Args:
        found: The choices.
        memory: The bytes of the busiest device for each choice; None if they are not known.
        limit: The bytes of a device; None for no limit.

    Returns:
        The text.
    """
    best = recommended(memory, limit)
    header = ["choice", "method", "schedule", "optimizer", "stages", "k", "lr", "batch", "idle", "late by"]
    rows = []
    for index, choice in enumerate(found):
        rows.append(
            [
                f"{'* ' if index == best else '  '}{choice.name}",
                choice.method,
                choice.pipeline.name,
                choice.optimizer,
                choice.stages,
                choice.accumulate,
                f"{choice.lr:g}",
                choice.batch_size,
                f"{choice.idle:.0%}",
                f"{choice.delay:.3g}",
                *([] if memory[index] is None else [_fits(memory[index] or 0, limit)]),
            ]
        )
    lines = [render([*header, *(["memory"] if memory[0] is not None else [])], rows, left=4), ""]
    lines.append("late by: mean delay of the first stage in updates; batch: samples in a micro-batch")
    if found[best].corrections:
        lines.append(f"corrections: {', '.join(found[best].corrections)}")
    if limit is not None and (memory[best] or 0) > limit:
        lines.append("nothing fits: give more devices or memory, or a smaller network")
    lines += ["", f"why {found[best].name}:", *(f"- {reason}" for reason in found[best].reasons)]
    return "\n".join(lines)


def estimate(config: PlanConfig, network: nn.Sequential, choice: Choice) -> int:
    """Return the bytes of the busiest device.

    Args:
        config: The network and its inputs.
        network: The network on the meta device.
        choice: The way to train.

    Returns:
        Weights, gradients, optimizer and activations at their peak.
    """
    inputs, targets = replace(config, batch_size=choice.batch_size).batch()
    method = find_method(choice.method)

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if choice.optimizer == "adamw":
            return torch.optim.AdamW(parameters)
        return torch.optim.SGD(parameters, 0.01, momentum=0.9)  # Muon has one buffer for inner matrices too

    estimator = MemoryEstimator(list(network), method, (inputs,), targets, loss=cross_entropy, optimizer=optimizer)
    # A larger k changes nothing: with exact gradients, at most as many micro-batches as stages are in flight.
    k = min(choice.accumulate, choice.stages if choice.pipeline.exact else 2)
    schedule = replace(choice, accumulate=k).pipeline
    cuts = partition(len(network), choice.stages)
    stages = [estimator.memory([cut], index, schedule)[0].total for index, cut in enumerate(cuts)]
    if choice.stages == choice.devices:
        return max(stages)
    return max(sum(stages[rank :: choice.devices]) for rank in range(choice.devices))


def _read_data(options: argparse.Namespace, recipe: dict[str, Any]) -> int | None:
    """Read shapes from the data, and return the number of samples; None without data."""
    spec = options.data or (recipe.get("data") if options.model == recipe.get("model") else None)
    options.data = spec
    if spec is None:
        return None
    for name in ("image", "vocab_size"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is given, but --data decides about it: leave it out")
    data = load_data(spec, seed=0, seq_len=options.seq_len or recipe.get("seq_len"))
    found = data.arguments
    options.classes = found.get("num_classes", options.classes)
    options.seq_len, options.vocab_size = found.get("seq_len"), found.get("vocab_size")
    if "in_channels" in found:
        size = found["image_size"]
        options.image = (found["in_channels"], *((size, size) if isinstance(size, int) else size))
    cpu = torch.device("cpu")
    return len(data.split("train", augment=False, device=cpu, dtype=torch.float32))


def _plan_config(options: argparse.Namespace, given: dict[str, Any], batch_size: int) -> PlanConfig:
    others: dict[str, Any]
    others = {"ranks": 1, "stages": 1, "accumulate": 1, "memory_limit": None, "ticks": 1, "no_run": True, "quiet": True}
    others |= {"method": "backprop", "schedule": None, "batch_size": batch_size, "latency": 0.0, "bandwidth": None}
    others |= {"optimizer": "sgd", "optimizer_state": "float32"}  # `estimate` has the optimizer of each choice
    names: dict[str, Any] = dict.fromkeys(options_of(NetworkOptions))
    return PlanConfig.from_options(
        argparse.Namespace(**{**vars(options), **names, **others, "set": list(given.items())})
    )


def _as_in_recipe(choice: Choice, recipe: dict[str, Any]) -> Choice:
    """With the learning rate of the recipe, if it is for this optimizer and number of samples per update."""
    same = choice.optimizer == recipe.get("optimizer", "sgd") and choice.accumulate == recipe.get("accumulate", 1)
    return replace(choice, lr=recipe["lr"]) if same and "lr" in recipe else choice


def _halved(choice: Choice) -> Choice:
    return replace(choice, batch_size=max(1, choice.batch_size // 2), accumulate=choice.accumulate * 2)


def _fits(needed: int, limit: int | None) -> str:
    shown = f"{needed / 2**30:.2f} GiB" if needed >= 2**30 else f"{needed / 2**20:.1f} MiB"
    return f"{shown}{' (too much)' if limit is not None and needed > limit else ''}"


def _call(choice: Choice) -> str:
    """The choice as a call of the trainer."""
    lines = [f'    method="{choice.method}", stages={choice.stages}, accumulate={choice.accumulate},']
    if choice.schedule is not None:
        lines.append(f'    schedule="{choice.schedule}",')
    if choice.optimizer == "sgd":
        made = f"torch.optim.SGD(p, {choice.lr:g}, momentum=0.9, nesterov=True)"
    elif choice.optimizer == "muon":
        made = f"petra.optim.Muon(petra.optim.muon_groups(p, hidden), lr={choice.lr:g})"
        lines.insert(0, "    # hidden = petra.optim.hidden_matrices(network)")
    else:
        made = f"torch.optim.AdamW(p, {choice.lr:g})"
    lines.append(f"    optimizer=lambda p: {made},")
    if choice.corrections:
        lines.append(f"    corrections={list(choice.corrections)},")
    body = "\n".join(f"    {line}" for line in lines)
    return f"    trainer = petra.Trainer(\n        network, loss=loss,\n{body}\n    )"
