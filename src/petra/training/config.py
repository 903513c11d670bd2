"""What a run is: every option that decides its result, checked before anything is allocated."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from typing import Any

import torch

from petra import methods, models
from petra.execution import partition
from petra.reversible import Network
from petra.training import recipes
from petra.training.trainer import choose_order


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
    lr: float | None = None
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warmup_epochs: float = 5.0
    drops: tuple[float, ...] = (0.5, 0.75)
    clip_norm: float | None = None
    autocast: str | None = None
    seed: int = 0
    replicas: int = 1
    messages: str | None = None
    model_options: dict[str, Any] = field(default_factory=dict)
    checkpoint_every: int = 0

    @classmethod
    def from_options(cls, recipe: str | None, options: dict[str, Any]) -> RunConfig:
        """Options that were given, over those of the recipe, over the defaults."""
        merged = dict(recipes.find(recipe).options) if recipe else {}
        model_options = {**merged.get("model_options", {}), **options.get("model_options", {})}
        if "model" in options and options["model"] != merged.get("model"):
            model_options = options.get("model_options", {})  # those of the recipe were for its own model
        method = methods.METHODS.get(options.get("method", ""))
        if method is not None and not method.pipelined:
            merged.pop("order", None)  # the recipe's is for its own method
        merged.update(options)
        merged["model_options"] = model_options
        for name in ("model", "data"):
            if name not in merged:
                raise ValueError(f"--{name} is missing: give it, or a --recipe that brings it")
        if "stages" not in options and "stages" in merged and isinstance(merged["stages"], int):
            merged["stages"] = min(merged["stages"], len(_outline(merged["model"], model_options)))
        return cls(**merged)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunConfig:
        """Read what `to_json` gave."""
        known = {f.name for f in fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"the run was written by another version of Petra: unknown {', '.join(sorted(unknown))}")
        return cls(**{**values, "drops": tuple(values["drops"])})

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "drops": list(self.drops)}

    @property
    def base_lr(self) -> float:
        """The learning rate after warm-up: as given, or by the paper's rule."""
        return self.lr if self.lr is not None else recipes.base_learning_rate(self.batch_size, self.accumulate)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.autocast == "bf16" else None

    @property
    def message_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.messages == "bf16" else None

    def validate(self) -> None:
        """Raise ValueError for the first thing that cannot work."""
        for name in ("epochs", "batch_size", "accumulate", "replicas"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}: give 1 or more")
        for name in ("momentum", "weight_decay", "warmup_epochs", "checkpoint_every", "seed"):
            if not isfinite(value := getattr(self, name)) or value < 0:
                raise ValueError(f"--{name.replace('_', '-')} is {value}: give 0 or more")
        if self.seed >= 2**63:
            raise ValueError(f"--seed is {self.seed}: give less than 2^63")
        if self.lr is not None and not (isfinite(self.lr) and self.lr >= 0):
            raise ValueError(f"--lr is {self.lr}: give 0 or more")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"--clip-norm is {self.clip_norm}: give a positive norm, or leave it out")
        if any(not 0 <= drop <= 1 for drop in self.drops):
            raise ValueError(f"--drops is {list(self.drops)}: give fractions of training between 0 and 1")
        if self.autocast not in (None, "bf16"):
            raise ValueError(f"--autocast is {self.autocast!r}: give bf16, or leave it out for float32")
        if self.messages not in (None, "bf16"):
            raise ValueError(f"--messages is {self.messages!r}: give bf16, or leave it out for float32")
        method = methods.find(self.method)
        cuts = partition(len(_outline(self.model, self.model_options)), self.stages)
        choose_order(method, len(cuts), self.accumulate, self.order)


def _outline(model: str, options: dict[str, Any]) -> Network:
    """The network without memory for its weights."""
    models.find(model)
    with torch.device("meta"):
        return models.create(model, **options)
