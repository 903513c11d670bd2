"""A training as a Petra command line, whose name says how it differs from the others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

SEQUENCES = 128
"""Sequences per update, unless others are asked for. A micro-batch has 1/k of them."""
COMMON: dict[str, Any] = {
    "model": "rev-gpt-25m",
    "seq_len": 256,
    "stages": 8,
    "lr_schedule": "cosine",
    "weight_decay": 0.1,
    "beta2": 0.95,
    "clip_norm": 1.0,  # of each stage
    "autocast": "bf16",
    "drop_last": True,
}
SMOKE: dict[str, Any] = {"width": 32, "depth": 2, "heads": 1, "seq_len": 16, "stages": 4, "autocast": None}
SMOKE_SEQUENCES = 32
WARM_UP = 0.1
"""Share of the training in which the learning rate rises."""

ASYNC = "low-staleness"
METHODS = {  # the word in the names: method and schedule
    "backprop": ("reversible", "sequential"),
    "exact": ("petra", "1f1b"),
    "petra": ("petra", ASYNC),
    "petra-stashed": ("petra-stashed", ASYNC),
    "delayed": ("delayed", ASYNC),
}


@dataclass(frozen=True)
class Trial:
    """One training.

    `kind` is a key of METHODS. `momentum` None is the optimizer's own. `model` are arguments of the network. `flush` is
    the number of first updates with exact gradients. `train_tokens` is the number of tokens that the training split is
    cut to; 0 does not cut it.
    """

    optimizer: str
    kind: str
    k: int
    lr: float
    epochs: int = 1
    seed: int = 0
    momentum: float | None = None
    corrections: str | None = None
    flush: int = 0
    model: tuple[tuple[str, str], ...] = field(default=())
    tiny: bool = False
    sequences: int = SEQUENCES
    train_tokens: int = 0

    @property
    def name(self) -> str:
        """Everything that differs between trainings."""
        words = [self.optimizer, *([f"b{self.momentum:g}"] if self.momentum else []), self.kind, f"k{self.k}"]
        words += [f"flush{self.flush}"] if self.flush else []
        words += [self.corrections.replace(":", "").replace(",", "+")] if self.corrections else []
        words += [f"{name}={value}" for name, value in self.model]
        words += [f"e{self.epochs}"] if self.epochs > 1 else []
        words += [f"u{self.sequences}"] if self.sequences != SEQUENCES else []
        words += [f"t{self.train_tokens / 1e6:g}m"] if self.train_tokens else []
        return "-".join([*words, f"lr{short(self.lr)}", f"s{self.seed}"])

    @property
    def group(self) -> Trial:
        """The same training without learning rate and seed."""
        return replace(self, lr=0.0, seed=0)

    @property
    def label(self) -> str:
        """The name without learning rate and seed."""
        return self.name.rpartition("-lr")[0]

    def arguments(self) -> list[str]:
        """Return the arguments of the Petra command line, without data, device and folder."""
        method, schedule = METHODS[self.kind]
        sequences = SMOKE_SEQUENCES if self.tiny else self.sequences
        options = {
            **COMMON,
            **(SMOKE if self.tiny else {}),
            "method": method,
            "schedule": schedule,
            "accumulate": self.k,
            "batch_size": sequences // self.k,
            "optimizer": self.optimizer,
            "lr": self.lr,
            "momentum": self.momentum,
            "corrections": self.corrections,
            "flush_until": self.flush or None,
            "epochs": self.epochs,
            "warmup_epochs": WARM_UP * self.epochs,
            "checkpoint_epochs": self.epochs,
            "seed": self.seed,
        }
        found = ["train"]
        for name, value in options.items():
            if value is not None:
                found += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        for name, setting in (("chunked_loss", "true"), *self.model):
            found += ["--set", f"{name}={setting}"]
        return found

    def smoke(self) -> Trial:
        """Return a tiny version of this training for a CPU."""
        return replace(self, tiny=True)


def short(lr: float) -> str:
    """Return a learning rate like 1e-3 or 1.5e-3."""
    digits, _, exponent = f"{lr:e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}"
