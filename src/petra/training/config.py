"""What a run is: every option that decides its result, checked before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn

from petra import methods, models
from petra.execution import partition
from petra.execution.stage import Loss
from petra.names import unknown
from petra.reversible import Network, ReversibleLayer
from petra.training import optimizers, recipes
from petra.training.curves import SCHEDULES, CosineCurve, LearningRateCurve
from petra.training.data import Data, load
from petra.training.fitting import check_options, usual_arguments
from petra.training.loss import cross_entropy
from petra.training.orders import choose_order
from petra.training.preparation import choose_corrections

ADAPTIVE = ("adamw", "nadamw")
MAY_CHANGE = ("checkpoint_every", "checkpoint_epochs", "stages", "order", "replicas", "data")
"""Options that a resumed run may be given anew; data may have moved, and is held against its fingerprint."""


@dataclass(frozen=True)
class RunConfig:
    """The options of a run; two runs with the same ones on the same machine give the same weights."""

    model: str
    data: str
    method: str = "petra"
    stages: int | list[int] = 4
    accumulate: int = 1
    order: str | list[int] | None = None
    epochs: int = 10
    batch_size: int = 64
    drop_last: bool = False
    optimizer: str = "sgd"
    lr: float | None = None
    momentum: float | None = None
    nesterov: bool = True
    beta2: float = 0.999
    weight_decay: float | None = None
    schedule: str = "steps"
    warmup_epochs: float = 5.0
    drops: tuple[float, ...] = (0.5, 0.75)
    clip_norm: float | None = None
    label_smoothing: float = 0.0
    autocast: str | None = None
    exact: bool = False
    compile: bool = False
    channels_last: bool = False
    seed: int = 0
    replicas: int = 1
    messages: str | None = None
    corrections: tuple[str, ...] = ()
    model_options: dict[str, Any] = field(default_factory=dict)
    length: int | None = None
    vocab_size: int | None = None
    weights: str | None = None
    checkpoint_every: int = 0
    checkpoint_epochs: int = 1

    @classmethod
    def from_options(cls, recipe: str | None, options: dict[str, Any]) -> RunConfig:
        """Options that were given, over those of the recipe, over the defaults."""
        merged = dict(recipes.find(recipe).options) if recipe else {}
        brought = merged.get("model_options", {})
        if "model" in options and "model" in merged:
            brought = _of_another(merged["model"], options["model"], brought)
        model_options = {**brought, **options.get("model_options", {})}
        method = methods.METHODS.get(options.get("method", ""))
        if method is not None:  # the recipe's are for its own method
            for name, meaningful in (("order", method.pipelined), ("corrections", method.stale)):
                if not meaningful:
                    merged.pop(name, None)
        merged.update(options)
        merged["model_options"] = model_options
        for name in ("model", "data"):
            if name not in merged:
                how = f"for the recipe {recipe} does not bring it" if recipe else "or a --recipe that brings it"
                raise ValueError(f"--{name} is missing: give it, {how}")
        if "drops" in options and merged.get("schedule") == "cosine":
            raise ValueError(f"--drops is {list(options['drops'])}, but the schedule is cosine: leave one of them out")
        if "beta2" in options and merged.get("optimizer") not in ADAPTIVE:
            raise ValueError(
                f"--beta2 is {options['beta2']}, but it is for adamw and nadamw: add --optimizer adamw, or leave it out"
            )
        if "stages" not in options and "stages" in merged and isinstance(merged["stages"], int):
            merged["stages"] = min(merged["stages"], len(_outline(merged["model"], model_options)))
        return cls(**merged)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunConfig:
        """Read what `to_json` gave."""
        known = {f.name for f in fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"the run was written by another version of Petra: unknown {', '.join(sorted(unknown))}")
        return cls(**{**values, "drops": tuple(values["drops"]), "corrections": tuple(values.get("corrections", ()))})

    @classmethod
    def read(cls, file: Path) -> RunConfig:
        """From a run's ``config.json``."""
        try:
            config = cls.from_json(json.loads(file.read_text()))
            config.validate()
            return config
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{file} is damaged ({error}): put back a copy, or remove the folder to start anew"
            ) from error

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "drops": list(self.drops), "corrections": list(self.corrections)}

    def refuse_change(self, before: str) -> None:
        """Raise ValueError if the checkpoint to go on from, which has the JSON ``before``, is of other options."""
        now = json.loads(json.dumps(self.to_json()))
        for name, value in json.loads(before).items():
            if name not in MAY_CHANGE and now.get(name) != value:
                raise ValueError(
                    f"the checkpoint was written with {name} {json.dumps(value)}, not {json.dumps(now.get(name))}: "
                    "put that back into config.json to resume it, or begin a new run with --weights"
                )

    @property
    def base_lr(self) -> float:
        """The learning rate after warm-up: as given, or for SGD by the paper's rule and 1e-3 for the others."""
        if self.lr is not None:
            return self.lr
        return 1e-3 if self.optimizer in ADAPTIVE else optimizers.base_learning_rate(self.batch_size, self.accumulate)

    @property
    def decay(self) -> float:
        """The weight decay: as given, or what suits the optimizer."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.05 if self.optimizer in ADAPTIVE else 5e-4

    @property
    def beta1(self) -> float:
        """The momentum: as given, or what suits the optimizer."""
        if self.momentum is not None:
            return self.momentum
        return 0.99 if self.optimizer == "nadamw" else 0.9

    @property
    def loss(self) -> Loss:
        """What is made small."""
        return partial(cross_entropy, label_smoothing=self.label_smoothing)

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of a stage."""
        if self.optimizer in ADAPTIVE:
            make = optimizers.adamw if self.optimizer == "adamw" else optimizers.nadamw
            return make(parameters, lr=self.base_lr, betas=(self.beta1, self.beta2), weight_decay=self.decay)
        return optimizers.sgd(
            parameters, lr=self.base_lr, momentum=self.beta1, nesterov=self.nesterov, weight_decay=self.decay
        )

    def curve(self, batches: int) -> LearningRateCurve | CosineCurve:
        """The learning rate over a training with so many micro-batches an epoch."""
        updates = batches / self.accumulate
        if self.schedule == "cosine":
            return CosineCurve(self.epochs, updates, self.warmup_epochs)
        return LearningRateCurve(self.epochs, updates, self.warmup_epochs, tuple(self.drops))

    def load_data(self, vocabulary: Sequence[str] = (), test_only: bool = False) -> Data:
        """The data set, in memory; of text with its own vocabulary, or with the one that is given.

        With ``test_only`` its train part may be missing.
        """
        size = {"length": self.length, "vocab_size": self.vocab_size}
        return load(self.data, seed=self.seed, vocabulary=vocabulary, test_only=test_only, **size)

    def evaluated_at_once(self, data: Data) -> int:
        """Samples in a batch for evaluation."""
        # A window of text is many samples in one already.
        return self.batch_size if "vocab_size" in data.arguments else max(self.batch_size, 256)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.autocast == "bf16" else None

    @property
    def message_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.messages == "bf16" else None

    def validate(self) -> None:
        """Raise ValueError for the first thing that cannot work."""
        for name in ("epochs", "batch_size", "accumulate", "replicas", "length", "vocab_size", "checkpoint_epochs"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}: give 1 or more")
        for name in ("lr", "momentum", "weight_decay", "warmup_epochs", "checkpoint_every", "seed"):
            if (value := getattr(self, name)) is not None and (not isfinite(value) or value < 0):
                raise ValueError(f"--{name.replace('_', '-')} is {value}: give 0 or more")
        if self.seed >= 2**63:
            raise ValueError(f"--seed is {self.seed}: give less than 2^63")
        for name, known in (("optimizer", optimizers.OPTIMIZERS), ("schedule", SCHEDULES)):
            if (value := getattr(self, name)) not in known:
                raise unknown(name, str(value), known)
        for name in ("beta2", "label_smoothing", "momentum"):
            if (value := getattr(self, name)) is not None and not 0 <= value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}: give 0 or more and less than 1")
        if not self.nesterov and self.optimizer in ADAPTIVE:
            raise ValueError(f"--no-nesterov is for sgd, not for {self.optimizer}: leave it out")
        if self.replicas > self.batch_size:
            raise ValueError(
                f"--replicas is {self.replicas}, but they share micro-batches of {self.batch_size} samples: "
                "give fewer replicas, or a larger --batch-size"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"--clip-norm is {self.clip_norm}: give a positive norm, or leave it out")
        if any(not 0 <= drop <= 1 for drop in self.drops):
            raise ValueError(f"--drops is {list(self.drops)}: give fractions of training between 0 and 1")
        if self.autocast not in (None, "bf16"):
            raise ValueError(f"--autocast is {self.autocast!r}: give bf16, or leave it out for float32")
        if self.messages not in (None, "bf16"):
            raise ValueError(f"--messages is {self.messages!r}: give bf16, or leave it out for float32")
        method = methods.find(self.method)
        outline = _outline(self.model, self.model_options)
        if self.exact and not any(isinstance(layer, ReversibleLayer) for layer in outline):
            raise ValueError(f"--exact is for reversible layers, and {self.model} has none: leave it out")
        if self.channels_last and not any(p.ndim == 4 for p in outline.parameters()):
            raise ValueError(f"--channels-last is for convolutions, and {self.model} has none: leave it out")
        cuts = partition(len(outline), self.stages)
        choose_order(method, len(cuts), self.accumulate, self.order)
        for correction in choose_corrections(self.corrections, method):
            correction.check(self.make_optimizer([nn.Parameter(torch.zeros(1))]))


def _of_another(model: str, other: str, options: dict[str, Any]) -> dict[str, Any]:
    """What of the options for one network is for the other too.

    Nothing, unless the same function builds both, as it does a network and its plain twin; and then not what their
    names stand for, like the depths of a RevNet-18 and a RevNet-34.
    """
    ours, theirs = models.find(model), models.find(other)
    if ours.build is not theirs.build:
        return {}
    return {name: value for name, value in options.items() if ours.arguments.get(name) == theirs.arguments.get(name)}


def _outline(model: str, options: dict[str, Any]) -> Network:
    """The network without memory for its weights; its layers are the same whatever the data."""
    check_options(model, options)
    usual = {**usual_arguments(model), **options}
    if "image_size" in usual and "patch" in options:
        # Until the data is known, a size that patches and windows divide, however often they are merged.
        options = {"image_size": 8 * options["patch"] * usual.get("window", 1), **options}
    with torch.device("meta"):
        return models.create(model, **options)
