"""Bits that the restructuring must not change: short runs of everything, compared with `same_bits.json`.

All names of the library are in the section "Names of the library"; the cases below it are plain data with neutral
words. Pipeline schedules are called ``schedule``, learning-rate schedules ``curve``.
``python tests/same_bits/test_same_bits.py --record`` records again. Where plain PyTorch gives other bits than on the
machine of the recording, cases with floating-point numbers are skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import fork_server
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import TCPStore

# ----------------------------------------------------------------------------------------------------------------------
# Names of the library: a refactoring changes this section and nothing below it.
# ----------------------------------------------------------------------------------------------------------------------
import petra
from petra.cli.main import main as command_line
from petra.distributed import ProcessTransport, run_together
from petra.methods.dni import DNI
from petra.trainer import optimizers
from petra.trainer.loss import cross_entropy
from petra.trainer.lr_schedules import CosineLRSchedule, StepLRSchedule

METHODS = {  # the neutral name of each: the library's
    "backprop": "backprop",
    "reversible": "reversible",
    "pareprop": "pareprop",
    "petra": "petra",
    "petra-stashed": "petra-stashed",
    "checkpointed": "checkpointed",
    "delayed": "delayed",
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "features-replay": "features-replay",
    "ddg": "ddg",
    "dni": "dni",
}
SCHEDULES: dict[str, str | list[int]] = {  # "own" is that of the method
    "low-staleness": "low-staleness",
    "lock-step": "lock-step",
    "locked-forward": "locked-forward",
    "in-flight": [5, 3, 2, 0],
}
CORRECTIONS = {
    "predict": "predict",
    "coast": "coast:0.8",
    "inertia": "inertia:4",
    "spike": "spike",
    "shrink": "shrink:0.9",
    "reschedule": "reschedule:8",
    "discrepancy": "discrepancy:0.135",
    "coast-with-momentum": "coast",
}
IMAGE = {"in_channels": 3, "num_classes": 4}
TINY = {"width": 8, "heads": 2, "depth": 2, "mlp_ratio": 2, "dropout": 0.1}
TEXT = {"vocab_size": 11, "seq_len": 6}
MERGING = {"width": 4, "depths": (2, 2), "heads": (1, 2), "image_size": 16, "patch": 2, "num_classes": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # networks with a name in the library, as small as they can be
    "revnet": ("revnet18", {**IMAGE, "width": 4, "depths": (2, 2)}),
    "revnet-bottlenecks": ("revnet50", {**IMAGE, "width": 4, "depths": (1, 1)}),
    "revnet-large-stem": ("revnet18", {**IMAGE, "width": 4, "depths": (2,), "stem": "imagenet"}),
    "resnet": ("resnet18", {**IMAGE, "width": 4, "depths": (1, 1)}),
    "resnet-bottlenecks": ("resnet50", {**IMAGE, "width": 4, "depths": (1, 1)}),
    "resnet-padded": ("resnet164-basic", {**IMAGE, "width": 4, "depths": (1, 1)}),
    "resnet-bottlenecks-without-bias": ("resnet101-cifar", {**IMAGE, "width": 4, "depths": (1, 1)}),
    "classic-reversible": ("revnet38", {**IMAGE, "width": 4, "depths": (2, 2)}),
    "classic-plain": ("resnet32", {**IMAGE, "width": 4, "depths": (1, 1)}),
    "classic-reversible-bottlenecks": ("revnet164", {**IMAGE, "width": 4, "depths": (1, 1)}),
    "classic-plain-bottlenecks": ("resnet164", {**IMAGE, "width": 4, "depths": (1, 1)}),
    "invertible-revnet": ("irevnet18", {**IMAGE, "width": 4, "depths": (1, 1)}),
    "invertible-revnet-bottlenecks": ("irevnet50", {**IMAGE, "width": 4, "depths": (1, 1)}),
    "vit-reversible": ("rev-vit-s", {**TINY, **IMAGE, "image_size": 8, "patch": 4, "drop_path": 0.1}),
    "vit-plain": ("vit-s", {**TINY, **IMAGE, "image_size": 8, "patch": 4, "drop_path": 0.1}),
    "swin-reversible": ("rev-swin-t", {**MERGING, "window": 3}),
    "swin-reversible-fused": ("rev-swin-t", {**MERGING, "window": 3, "fuse": "linear", "dropout": 0.1}),
    "swin-plain": ("swin-t", {**MERGING, "window": 3}),
    "mvit-reversible": ("rev-mvit-s", {**MERGING, "mlp_ratio": 2, "drop_path": 0.1}),
    "mvit-plain": ("mvit-s", {**MERGING, "mlp_ratio": 2}),
    "gpt-reversible": ("rev-gpt", {**TINY, **TEXT}),
    "gpt-plain": ("gpt", {**TINY, **TEXT}),
    "roberta-reversible": ("rev-roberta-small", {**TINY, **TEXT, "num_classes": 4}),
    "roberta-plain": ("roberta-small", {**TINY, **TEXT, "num_classes": 4}),
}
OF_TEXT = ("gpt-reversible", "gpt-plain", "roberta-reversible", "roberta-plain")


def make_network(kind: str) -> nn.Sequential:
    """One of `FAMILIES`, or "mixed", which has layers of all kinds with batch norm and dropout."""
    if kind in FAMILIES:
        name, arguments = FAMILIES[kind]
        return petra.models.create(name, **arguments)
    return petra.Network(
        Split(),
        petra.ReversibleResidual(function(3)),
        petra.ReversibleBlock(function(3), function(3)),
        petra.ReversibleBlock(function(3), function(3), coupling=petra.FixedPointCoupling),
        petra.InvertibleDownsampling(2),
        petra.ReversibleBlock(ScaleAndShift(12), ScaleAndShift(12), coupling=petra.AffineCoupling),
        Classify(),
    )


def make_trainer(network: nn.Sequential, case: Mapping[str, Any], transport: Any = None) -> petra.Trainer:
    """A trainer for a case; what a case does not say is left to the library."""
    rate, kind = case.get("rate", 0.05), case.get("optimizer", "sgd")

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if kind == "sgd":
            return optimizers.sgd(parameters, lr=rate, weight_decay=1e-3)
        make = {"adamw": optimizers.adamw, "nadamw": optimizers.nadamw}[kind]
        return make(parameters, lr=rate / 10, weight_decay=0.1)

    options: dict[str, Any] = {"accumulate": case.get("k", 1), "stages": case.get("stages", 4), "seed": 3}
    options["method"] = METHODS[case["method"]]
    if "synthesizer_rate" in case:
        options["method"] = DNI(case["synthesizer_rate"])
    if case.get("schedule", "own") != "own":
        options["schedule"] = SCHEDULES[case["schedule"]]
    if "correction" in case:
        options["corrections"] = [CORRECTIONS[name] for name in case["correction"].split("+")]
    if "curve" in case:
        curves = {"steps": StepLRSchedule(2, 5.0, 0.5, (0.3, 0.6)), "cosine": CosineLRSchedule(2, 5.0, 0.5)}
        options["scheduler"] = curves[case["curve"]].scheduler
    if "clip" in case:
        options["clip_norm"] = case["clip"]
    if "messages" in case:
        options["comm_dtype"] = {"bf16": torch.bfloat16}[case["messages"]]
    if "autocast" in case:
        options["autocast"] = {"bf16": torch.bfloat16}[case["autocast"]]
    if "placement" in case:
        options["placement"] = case["placement"]
    return petra.Trainer(network, loss=cross_entropy, optimizer=optimizer, transport=transport, **options)


def feed(trainer: petra.Trainer, inputs: Tensor, targets: Tensor) -> list[tuple[int, float]]:
    """Train on a micro-batch; micro-batches that have reached the loss, and the losses."""
    return [(one.microbatch, float(one.loss)) for one in trainer.step(inputs, targets)]


def finish(trainer: petra.Trainer) -> list[tuple[int, float]]:
    """The same for what is in flight."""
    return [(one.microbatch, float(one.loss)) for one in trainer.drain()]


def evaluate(trainer: petra.Trainer, batches: Iterable[tuple[Tensor, Tensor]]) -> list[Any]:
    """Loss, accuracy and number of samples."""
    found = trainer.evaluate(batches)
    return [found.loss, found.accuracy, found.samples]


def whole_weights(trainer: petra.Trainer) -> dict[str, Tensor] | None:
    """All weights and buffers of the network, on the rank that has them."""
    return trainer.weights()


def save_state(trainer: petra.Trainer) -> Any:
    """All that `load_state` goes on from."""
    return trainer.state_dict()


def load_state(trainer: petra.Trainer, state: Any) -> None:
    trainer.load_state_dict(state)


def process_transport(replicas: int) -> Any:
    """What joins the processes of the default group of `torch.distributed`."""
    return ProcessTransport("cpu", replicas, timedelta(seconds=60))


def replica_of(transport: Any) -> int:
    return int(transport.position.replica)


def on_threads(work: Any, ranks: int, replicas: int) -> list[Any]:
    """What ``work(transport)`` gives on every rank, all of them threads."""
    return run_together(work, ranks, replicas)


def differentiating(way: str) -> Any:
    """A context for the forward pass: how reversible layers go back."""
    return {"reversible": nullcontext, "pareprop": petra.pareprop, "plain": petra.plain_autograd}[way]()


def convert(network: nn.Module) -> nn.Module:
    """Residual blocks made reversible."""
    return petra.make_reversible(network)


FLAGS = {  # options of the command line, by their neutral names
    "recipe": "--recipe",
    "network": "--model",
    "data": "--data",
    "width": "--width",
    "depth": "--depth",
    "depths": "--depths",
    "heads": "--heads",
    "dropout": "--dropout",
    "length": "--seq-len",
    "method": "--method",
    "stages": "--stages",
    "schedule": "--schedule",
    "correction": "--corrections",
    "k": "--accumulate",
    "epochs": "--epochs",
    "batch": "--batch-size",
    "drop_last": "--drop-last",
    "optimizer": "--optimizer",
    "rate": "--lr",
    "momentum": "--momentum",
    "no_nesterov": "--no-nesterov",
    "beta2": "--beta2",
    "decay": "--weight-decay",
    "curve": "--lr-schedule",
    "warmup": "--warmup-epochs",
    "drops": "--lr-milestones",
    "clip": "--clip-norm",
    "smoothing": "--label-smoothing",
    "autocast": "--autocast",
    "exact": "--coupling",
    "channels_last": "--channels-last",
    "messages": "--comm-dtype",
    "seed": "--seed",
    "every": "--every",
    "image": "--image",
    "methods": "--methods",
    "microbatches": "--microbatches",
}
SMALL_REVNET = {"network": "revnet18", "width": 4, "depths": "2,1", "stages": 4}
SMALL_RESNET = {"network": "resnet164-basic", "width": 4, "depths": "1,1"}
SMALL_GPT = {"network": "rev-gpt", "width": 8, "depth": 2, "heads": 2, "length": 8, "dropout": 0.1, "stages": 3}
SMALL_ROBERTA = {"network": "rev-roberta-small", "width": 8, "depth": 2, "heads": 2, "length": 8, "stages": 3}
RANDOM_IMAGES = {"data": "synthetic:3x8x8:4:96"}
DIGITS = {"recipe": "digits"}


def words(case: Mapping[str, Any]) -> list[str]:
    """A case as words of the command line."""
    found = []
    for name, value in case.items():
        if name == "method":
            value = METHODS[value]
        elif name == "methods":
            value = ",".join(METHODS[method] for method in value)
        elif name == "schedule":
            said = SCHEDULES[value]
            value = said if isinstance(said, str) else ",".join(map(str, said))
        elif name == "correction":
            value = ",".join(CORRECTIONS[part] for part in value.split("+"))
        elif name == "exact":
            value = "fixed-point"
        found += [FLAGS[name]] if value is True else [FLAGS[name], str(value)]
    return found


def command(*arguments: object) -> str:
    """What a command prints; it draws no figures, which takes seconds."""
    printed, missing = io.StringIO(), {"find_spec": lambda name: None}
    figures = [patch.multiple(f"petra.measure.{name}", **missing) for name in ("similarity_figure", "memory_figure")]
    with redirect_stdout(printed), figures[0], figures[1]:
        assert command_line([str(argument) for argument in arguments]) in (0, None), arguments
    return printed.getvalue()


ON_CPU = ("--device", "cpu", "--threads", "1")


def train_cli(case: Mapping[str, Any], folder: Path, kind: str = "train") -> dict[str, Any]:
    """A run from the command line: its weights, its figures of every epoch, and the bytes of its stages."""
    command(kind, *words(case), *ON_CPU, "--quiet", "--out", folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "lr")
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "weights": load_file(folder / "weights.safetensors"),
        "epochs": [[line[name] for name in names] for line in lines],
        "bytes": [summary["activation_peak_bytes"], *(list(stage.values()) for stage in summary["memory_bytes"])],
    }


def evaluate_cli(folder: Path) -> list[Any]:
    """Loss, accuracy and samples of a run that has ended."""
    found = json.loads(command("evaluate", folder, "--json", *ON_CPU))
    return [found[name] for name in ("test_loss", "test_accuracy", "samples")]


def generate_cli(folder: Path) -> str:
    return command("generate", folder, "--prompt", "ab", "--max-new-tokens", "40", *ON_CPU)


def fidelity_cli(case: Mapping[str, Any], folder: Path) -> list[list[Any]]:
    """Update, stage, micro-batch, and all figures of the likeness of gradients, of every row."""
    command("fidelity", *words(case), *ON_CPU, "--quiet", "--out", folder)
    names = ("update", "stage", "microbatch", "cosine", "norm_ratio", "sigma", "cosine_to_delayed")
    names += ("norm_ratio_to_delayed", "delayed_cosine", "delayed_norm_ratio", "delayed_sigma")
    rows = [json.loads(line) for line in (folder / "fidelity.jsonl").read_text().splitlines()]
    return [[row[name] for name in names] for row in rows]


def memory_cli(case: Mapping[str, Any], folder: Path) -> dict[str, dict[str, list[int]]]:
    """Bytes of stages, by method and number of stages."""
    command("memory", *words(case), "--quiet", "--out", folder)
    found = json.loads((folder / "memory.json").read_text())["bytes_of_stages"]
    return {method: found[METHODS[method]] for method in case["methods"]}


def schedule_cli(case: Mapping[str, Any]) -> list[str]:
    """The drawing of a schedule, and how stale stages are."""
    name = words({"schedule": case["schedule"]})[1:] if "schedule" in case else []
    others = {key: value for key, value in case.items() if key != "schedule"}
    *drawing, last = command("schedule", *name, *words(others)).splitlines()
    return [*drawing, last.split(":")[-1].strip()]  # but for its name


# ----------------------------------------------------------------------------------------------------------------------
# Cases: plain data. A key says what is done, with neutral words.
# ----------------------------------------------------------------------------------------------------------------------
Case = dict[str, Any]
RECORDING = Path(__file__).with_name("same_bits.json")
PIPELINED = ("petra", "petra-stashed", "checkpointed", "delayed")
REPLAYING = ("features-replay", "ddg")
SINGLE = ("predict", "coast", "inertia", "spike", "shrink", "reschedule", "discrepancy")
OLD_WEIGHTS = ("petra-stashed", "delayed", "ddg")  # they go back with those of their forward: no discrepancy
WAYS = ("reversible", "pareprop", "plain")


def schedules_of(method: str) -> tuple[str, ...]:
    return tuple(SCHEDULES) if method in PIPELINED else ("own",)


def corrections_of(method: str) -> tuple[str, ...]:
    if method not in PIPELINED + REPLAYING:
        return ()
    return tuple(name for name in SINGLE if name != "discrepancy" or method not in OLD_WEIGHTS)


def all_cases() -> dict[str, Case]:
    """Every case by its key."""
    cases: dict[str, Case] = {}

    def add(key: str, do: str, **case: Any) -> None:
        assert key not in cases, key
        cases[key] = {"do": do, **case}

    def train(where: str, method: str, schedule: str = "own", **case: Any) -> None:
        said = [f"{name}={value}" for name, value in case.items() if name not in ("network", "correction", "k", "do")]
        network, do = case.pop("network", "revnet"), case.pop("do", where)
        parts = [where, *([network] if network != "revnet" else []), method, schedule]
        parts += [case["correction"]] if "correction" in case else []
        parts += [f"k={case['k']}"] if "k" in case else []
        key = "/".join([*parts, *said]).replace(" ", "")
        add(key, do, network=network, method=method, schedule=schedule, **case)

    # One process: every method, schedule and correction.
    for method in METHODS:
        for schedule in schedules_of(method):
            train("one-process", method, schedule)
            train("one-process", method, schedule, k=3)
            for correction in corrections_of(method):
                train("one-process", method, schedule, correction=correction)
                if (method, schedule) in (("petra", "lock-step"), ("features-replay", "own")):
                    train("one-process", method, schedule, correction=correction, k=3)
    # Everything else that has a say, with some methods.
    petra_ = ("petra", "low-staleness")
    train("one-process", *petra_, correction="predict+inertia")
    train("one-process", *petra_, correction="predict+inertia", k=3, curve="cosine")
    train("one-process", *petra_, correction="coast-with-momentum+shrink+spike")
    train("one-process", *petra_, correction="predict", optimizer="adamw")
    train("one-process", *petra_, correction="coast", optimizer="adamw", k=3)
    train("one-process", *petra_, correction="inertia", curve="steps")
    for method, schedule in (petra_, ("delayed", "lock-step"), ("features-replay", "own"), ("backprop", "own")):
        for optimizer in ("adamw", "nadamw"):
            train("one-process", method, schedule, optimizer=optimizer)
        for curve in ("steps", "cosine"):
            train("one-process", method, schedule, curve=curve)
            train("one-process", method, schedule, curve=curve, k=3, optimizer="adamw")
        train("one-process", method, schedule, clip=0.3)
        train("one-process", method, schedule, clip=0.3, k=3)
        train("one-process", method, schedule, messages="bf16")
        train("one-process", method, schedule, channels_last=True)
        train("one-process", method, schedule, autocast="bf16")
        train("one-process", method, schedule, autocast="bf16", messages="bf16", stages=6, channels_last=True)
        train("one-process", method, schedule, resume=7)
    train("one-process", *petra_, correction="discrepancy", resume=7)
    train("one-process", *petra_, stages=6)
    train("one-process", *petra_, stages=[3, 1, 2])
    for method in ("ddg", "dni", "petra-stashed", "gpipe"):
        train("one-process", method, messages="bf16")
        train("one-process", method, resume=7, k=3)
    train("one-process", "dni", synthesizer_rate=0.01)
    for network in ("mixed", "gpt-reversible", "vit-reversible"):
        for method in METHODS if network == "mixed" else ("reversible", "petra-stashed", "delayed", "ddg", "dni"):
            train("one-process", method, network=network)
        train("one-process", *petra_, network=network, correction="predict+inertia", k=3)
        train("one-process", *petra_, network=network, optimizer="adamw", clip=0.5, curve="cosine")
        train("one-process", "petra", "lock-step", network=network, messages="bf16")
    # Two ranks that are processes.
    once = {"petra-stashed": "low-staleness", "checkpointed": "locked-forward", "delayed": "lock-step"}
    for method in METHODS:
        for schedule in schedules_of(method):
            if method == "petra" or once.get(method, schedule) == schedule:
                train("two-ranks", method, schedule)
        if method in ("gpipe", "1f1b"):
            train("two-ranks", method, k=3)
    for correction in SINGLE:
        train("two-ranks", *petra_, correction=correction)
    train("two-ranks", "features-replay", correction="predict")
    train("two-ranks", *petra_, messages="bf16")
    train("two-ranks", *petra_, channels_last=True)
    train("two-ranks", *petra_, clip=0.3, k=3, curve="cosine")
    train("two-ranks", *petra_, placement=[0, 1, 0, 1])
    train("two-ranks", *petra_, network="mixed", optimizer="adamw")
    train("two-ranks", *petra_, network="gpt-reversible")
    train("two-ranks", *petra_, replicas=2)
    train("two-ranks", "features-replay", replicas=2, k=3)
    # Ranks that are threads.
    train("two-threads", *petra_)
    train("two-threads", *petra_, replicas=2)
    train("two-threads", "ddg", replicas=2)
    # Whole runs from the command line.
    digits = {**SMALL_REVNET, **DIGITS, "batch": 64, "epochs": 1}
    for method in ("backprop", "petra", "features-replay"):
        add(f"command/digits/{method}", "command", **digits, method=method)
    images = {**SMALL_REVNET, **RANDOM_IMAGES, "batch": 8, "epochs": 2, "rate": 0.05, "warmup": 0.5}
    for method in METHODS:
        if method not in ("reversible", "pareprop"):
            add(f"command/random-images/{method}", "command", **images, method=method)
    for change in (
        {"schedule": "lock-step"},
        {"schedule": "in-flight"},
        {"method": "delayed", "schedule": "locked-forward"},
        {"correction": "predict+inertia", "k": 2},
        {"correction": "reschedule+discrepancy"},
        {"curve": "cosine", "k": 3},
        {"drops": "0.3,0.6"},
        {"optimizer": "adamw", "rate": 0.005, "curve": "cosine"},
        {"optimizer": "nadamw", "rate": 0.005},
        {"optimizer": "adamw", "rate": 0.005, "beta2": 0.9, "momentum": 0.8, "decay": 0.1},
        {"no_nesterov": True, "decay": 0.01},
        {"clip": 0.3},
        {"smoothing": 0.1},
        {"messages": "bf16"},
        {"channels_last": True},
        {"autocast": "bf16"},
        {"exact": True},
        {"drop_last": True, "batch": 10},
        {"seed": 5},
    ):
        said = ",".join(f"{name}={value}" for name, value in change.items())
        add(f"command/random-images/{said}", "command", **{**images, "method": "petra", **change})
    text = {**SMALL_GPT, "batch": 4, "epochs": 1, "warmup": 0.5, "optimizer": "adamw", "rate": 0.005}
    add("command/text/petra", "command", **text, method="petra", curve="cosine", clip=1.0)
    add("command/sentences/features-replay", "command", **{**text, **SMALL_ROBERTA}, method="features-replay")
    # How alike gradients are.
    for method in ("petra", "delayed", "features-replay"):
        add(f"fidelity/{method}", "fidelity", **images, method=method, every=4)
    add("fidelity/petra/lock-step", "fidelity", **images, method="petra", schedule="lock-step", k=2, every=2)
    # Bytes of activations.
    small = {"image": "3x8x8", "batch": 2}
    exact, late = ("backprop", "reversible", "gpipe", "1f1b", "dni"), ("features-replay", "ddg", *PIPELINED)
    resnet = {**SMALL_RESNET, **small, "stages": "1,3"}
    revnet = {**SMALL_REVNET, **small}
    add("memory/resnet", "memory", **resnet, methods=("backprop", "features-replay", "ddg", "dni"))
    add("memory/revnet/exact", "memory", **revnet, methods=exact)
    add("memory/revnet/late", "memory", **revnet, methods=late)
    for schedule in ("lock-step", "locked-forward"):
        add(f"memory/revnet/{schedule}", "memory", **revnet, methods=("petra", "delayed"), schedule=schedule)
    # Schedules as they are drawn.
    for method in METHODS:
        for schedule in schedules_of(method):
            for k in (1, 3):
                asked: Case = {} if schedule == "own" else {"schedule": schedule}
                asked |= {"method": method, "k": k, "stages": 4, "microbatches": 7}
                add(f"schedule/{method}/{schedule}/k={k}", "schedule", **asked)
    # Gradients of networks, and of one that was converted.
    for family in FAMILIES:
        for way in WAYS:
            add(f"gradients/{family}/{way}", "gradients", network=family, way=way)
    for way in WAYS:
        add(f"gradients/mixed/{way}", "gradients", network="mixed", way=way)
    for first in (True, False):
        for way in WAYS:
            add(f"conversion/{'pre' if first else 'post'}-norm/{way}", "conversion", norm_first=first, way=way)
    return cases


# ----------------------------------------------------------------------------------------------------------------------
# What is done with a case. From here on nothing is of the library.
# ----------------------------------------------------------------------------------------------------------------------
TICKS = 13
EXACT = ("memory", "schedule")  # they compute nothing in floating point


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.body(x).chunk(2, dim=1)


class Classify(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.fc = nn.Dropout(0.1), nn.Linear(24, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fc(self.drop(torch.cat([x.mean((2, 3)), y.mean((2, 3))], 1)))


class ScaleAndShift(nn.Module):
    """What an affine coupling wants of its function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.body(x).chunk(2, dim=1)


def function(width: int) -> nn.Sequential:
    convolution = nn.Conv2d(width, width, 3, padding=1)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.2))


def set_up() -> None:
    """So that bits do not depend on the number of threads; as in the other tests."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)


def sha(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def hash_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Of all with their names, and of all without: that one stays where only names of weights have changed."""
    # One buffer that is not saved has a new name.
    ordered = sorted((name.replace("key_positions", "places"), tensor) for name, tensor in tensors.items())
    return {
        "weights": sha(*(part for name, tensor in ordered for part in (name.encode(), raw(tensor)))),
        "values": sha(*sorted(sha(str(tuple(t.shape)).encode(), raw(t)).encode() for t in tensors.values())),
    }


def exactly(value: Any) -> Any:
    """Floats as their bits, in plain JSON."""
    if isinstance(value, float):
        return value.hex()
    return [exactly(part) for part in value] if isinstance(value, list | tuple) else value


def hash_numbers(value: Any) -> str:
    return sha(json.dumps(exactly(value)).encode())


def batches(network: str, count: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """The sixth is smaller, as at the end of an epoch."""
    generator = torch.Generator().manual_seed(seed)
    for i in range(count):
        n = 2 if i == 5 else 4
        if network in OF_TEXT:
            x = torch.randint(2, 11, (n, 6), generator=generator)
            shape = (n, 6) if network.startswith("gpt") else (n,)
        else:
            side = 16 if network.startswith(("swin", "mvit")) else 8
            x, shape = torch.randn(n, 3, side, side, generator=generator), (n,)
        yield x, torch.randint(4, shape, generator=generator)


def train(case: Case, transport: Any = None) -> dict[str, Any]:
    """What a process knows in the end: weights (one of them does), losses and an evaluation."""
    set_up()

    def begin() -> Any:
        torch.manual_seed(1)
        network = make_network(case["network"])
        if case.get("channels_last"):
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return make_trainer(network, case, transport)

    def share(x: Tensor) -> Tensor:
        return x if "replicas" not in case else x[replica_of(transport) :: case["replicas"]]

    trainer, losses = begin(), []
    for i, (x, y) in enumerate(batches(case["network"], case.get("ticks", TICKS))):
        losses += feed(trainer, share(x), share(y))
        if i == case.get("resume"):  # through a file, into another trainer
            file = io.BytesIO()
            torch.save(save_state(trainer), file)
            file.seek(0)
            trainer = begin()
            load_state(trainer, torch.load(file, weights_only=True))
    losses += finish(trainer)
    found = evaluate(trainer, ((share(x), share(y)) for x, y in batches(case["network"], 3, seed=5)))
    weights = whole_weights(trainer)
    return {
        "weights": None if weights is None else hash_tensors(weights),
        "losses": losses,
        "evaluation": exactly(found),
    }


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the processes of a job know together; the same as one process alone would say."""
    (weights,) = [rank["weights"] for rank in ranks if rank["weights"] is not None]
    losses = [(m, number, loss) for number, rank in enumerate(ranks) for m, loss in rank["losses"]]
    assert all(rank["evaluation"] == ranks[0]["evaluation"] for rank in ranks)
    ordered = [[m, loss] for m, _, loss in sorted(losses)]
    return {**weights, "losses": hash_numbers(ordered), "evaluation": ranks[0]["evaluation"]}


def do_one_process(case: Case) -> dict[str, Any]:
    return together([train(case)])


def do_two_threads(case: Case) -> dict[str, Any]:
    replicas = case.get("replicas", 1)
    return together(on_threads(lambda transport: train(case, transport), 2 // replicas, replicas))


def serve(rank: int, port: int, questions: Connection) -> None:
    """One of two processes that live on, and train whatever they are asked for."""
    set_up()
    store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    transports: dict[int, Any] = {}
    while True:
        try:
            case = questions.recv()
        except EOFError:  # nobody will ask any more
            os._exit(0)
        try:
            replicas = case.get("replicas", 1)
            if replicas not in transports:
                transports[replicas] = process_transport(replicas)
            questions.send(train(case, transports[replicas]))
        except Exception as error:
            questions.send(f"rank {rank}: {type(error).__name__}: {error}")


class Pair:
    """Two processes, started when they are needed. Nothing hangs: both are killed when time is up, or at the end."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._ends: list[Connection] = []
        self._store: TCPStore | None = None

    def __call__(self, case: Case, limit: float = 150.0) -> dict[str, Any]:
        if not self._processes:
            self._start()
        results: list[Any] = []
        try:
            for end in self._ends:
                end.send(case)
            until = time.monotonic() + limit
            for end in self._ends:
                assert end.poll(max(0.0, until - time.monotonic())), f"a rank has said nothing for {limit:g} s"
                results.append(end.recv())
            assert all(isinstance(result, dict) for result in results), results
            return together(results)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = fork_server.context()
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(ours)

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._ends, self._store = [], [], None


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def do_command(case: Case) -> dict[str, Any]:
    with folder() as where:
        of_text = "data" not in case and "recipe" not in case
        asked = {**case, "data": write_text(where, case)} if of_text else case
        found = train_cli(asked, where / "run")
        result = {**hash_tensors(found["weights"]), "epochs": exactly(found["epochs"]), "bytes": found["bytes"]}
        result["evaluation"] = exactly(evaluate_cli(where / "run"))
        if of_text and case["method"] == "petra":
            result["text"] = generate_cli(where / "run")
        return result


def write_text(where: Path, case: Case) -> str:
    """A text, or sentences with labels."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(8, (600,), generator=generator).tolist()
    text = "".join("abcdef g"[i] for i in letters)
    if case["method"] == "petra":
        (where / "text.txt").write_text(text)
        return f"text:{where / 'text.txt'}"
    (where / "data").mkdir()
    for name, lines in (("train", range(40)), ("test", range(40, 50))):
        rows = [f"{text[12 * i : 12 * i + 12].strip() or 'a'}\t{i % 3 % 2}" for i in lines]
        (where / "data" / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    return str(where / "data")


def do_fidelity(case: Case) -> dict[str, Any]:
    with folder() as where:
        rows = fidelity_cli(case, where / "run")
        return {"rows": len(rows), "figures": hash_numbers(rows), "last": exactly(rows[-1])}


def do_memory(case: Case) -> dict[str, Any]:
    with folder() as where:
        return {"bytes": memory_cli(case, where / "out")}


def do_schedule(case: Case) -> dict[str, Any]:
    return {"drawing": schedule_cli(case)}


def gradients(network: nn.Module, x: Tensor, way: str) -> dict[str, Any]:
    """Hashes of outputs, gradients and buffers of one forward and backward pass."""
    torch.manual_seed(3)
    if x.is_floating_point():
        x = x.requires_grad_()
    with differentiating(way):
        y = network(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    found = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": value for name, value in network.named_buffers()}
    if x.grad is not None:
        found["of the input"] = x.grad
    return {"outputs": sha(raw(y)), **hash_tensors(found)}


def enlarge(network: nn.Module) -> nn.Module:
    """Weights large enough for every part to matter, biases and norms included."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in network.parameters():
            p += 0.2 * torch.randn(p.shape, generator=generator)
    return network


def do_gradients(case: Case) -> dict[str, Any]:
    torch.manual_seed(1)
    network = enlarge(make_network(case["network"]))
    return gradients(network, next(batches(case["network"], 1))[0], case["way"])


def do_conversion(case: Case) -> dict[str, Any]:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True, norm_first=case["norm_first"])
    network = convert(enlarge(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)))
    return gradients(network, torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)), case["way"])


DOING = {
    "one-process": do_one_process,
    "two-threads": do_two_threads,
    "command": do_command,
    "fidelity": do_fidelity,
    "memory": do_memory,
    "schedule": do_schedule,
    "gradients": do_gradients,
    "conversion": do_conversion,
}


def compute(case: Case, pair: Pair | None = None) -> dict[str, Any]:
    """What a case gives, as it comes out of JSON; for two ranks a pair of processes is needed."""
    set_up()
    asked = {name: value for name, value in case.items() if name != "do"}
    if case["do"] == "two-ranks":
        assert pair is not None
        found = pair(asked)
    else:
        found = DOING[case["do"]](asked)
    return json.loads(json.dumps(found))


@cache
def canary() -> str:
    """Bits of plain PyTorch, which are those of the recording on machines where the others can be."""
    set_up()
    torch.manual_seed(0)
    image, tokens = torch.randn(4, 3, 8, 8), torch.randn(4, 6, 8)
    network = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(384, 4)
    )
    encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", batch_first=True)
    both = [*network.parameters(), *encoder.parameters()]
    optimizer = torch.optim.AdamW(both, 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(image), torch.arange(4)) + encoder(tokens).sigmoid().square().mean()
        loss.backward()
        optimizer.step()
    return sha(*map(raw, both))


def environment() -> dict[str, str]:
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "machine": platform.machine(), "capability": capability}


CASES = all_cases()
RECORDED: dict[str, Any] = json.loads(RECORDING.read_text()) if RECORDING.exists() else {"cases": {}}
KEYS = [key for key in RECORDED["cases"] if key in CASES]


def refuse_other_machines(case: Case) -> None:
    if case["do"] not in EXACT and canary() != RECORDED["canary"]:
        pytest.skip(f"plain PyTorch gives other bits here ({environment()}) than there ({RECORDED['environment']})")


@contextmanager
def two_processes() -> Iterator[Pair]:
    pair = Pair()
    try:
        yield pair
    finally:
        pair.close()


@pytest.mark.timeout(900)
def test_bits_of_two_ranks_are_those_that_were_recorded() -> None:
    """One test for all, for two processes do them all; says which have changed."""
    keys = [key for key in KEYS if CASES[key]["do"] == "two-ranks"]
    refuse_other_machines(CASES[keys[0]])
    changed = {}
    with two_processes() as pair:
        for key in keys:
            try:
                found: Any = compute(CASES[key], pair)
            except AssertionError as error:  # the pair was killed; others go on with a new one
                found = str(error)
            if found != RECORDED["cases"][key]:
                changed[key] = found
    assert changed == {}


@pytest.mark.parametrize("key", [key for key in KEYS if CASES[key]["do"] != "two-ranks"])
def test_bits_are_those_that_were_recorded(key: str) -> None:
    refuse_other_machines(CASES[key])
    assert compute(CASES[key]) == RECORDED["cases"][key]


def test_every_case_is_recorded() -> None:
    assert set(CASES) == set(RECORDED["cases"])


@pytest.mark.parametrize("change", [{"rate": 0.0500001}, {"k": 2}, {"clip": 0.01}, {"correction": "shrink"}])
def test_a_change_is_noticed(change: dict[str, Any]) -> None:
    key = "one-process/petra/low-staleness"
    refuse_other_machines(CASES[key])
    found, expected = compute({**CASES[key], **change}), RECORDED["cases"][key]
    assert all(found[name] != expected[name] for name in expected)


def test_ranks_say_what_one_process_says() -> None:
    """In the recording; replicas have means of their own."""
    recorded = RECORDED["cases"]
    for key, case in CASES.items():
        if case["do"] in ("two-ranks", "two-threads") and "replicas" not in case and "placement" not in case:
            alone = "/".join(["one-process", *key.split("/")[1:]])
            assert alone not in recorded or recorded[alone] == recorded[key], key


def record(file: Path, only: str) -> None:
    found: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    with two_processes() as pair:
        for key, case in CASES.items():
            if key.startswith(only):
                begin = time.perf_counter()
                found[key] = compute(case, pair)
                seconds[case["do"]] = seconds.get(case["do"], 0.0) + time.perf_counter() - begin
    print({kind: round(value, 1) for kind, value in seconds.items()}, file=sys.stderr)
    whole = {"environment": environment(), "canary": canary(), "cases": found}
    file.write_text(json.dumps(whole, ensure_ascii=False).replace('}, "', '},\n"') + "\n")  # a line a case


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", nargs="?", type=Path, const=RECORDING, required=True, metavar="FILE")
    parser.add_argument("--only", default="", metavar="BEGINNING", help="cases whose keys begin with it")
    options = parser.parse_args()
    record(options.record, options.only)
