"""The plans: which trainings each question needs. A training that two plans need has one name and runs once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from trials import METHODS, SEQUENCES, Trial

OPTIMIZERS = ("adamw", "muon", "soap")
KS = (1, 2, 4, 8, 16, 32)
EXACT_K = 8
LEARNING_RATES = {"adamw": (1e-3, 2e-3, 4e-3), "muon": (1e-3, 2e-3, 4e-3), "soap": (1e-3, 2e-3, 4e-3)}
LEARNING_RATES["nadamw"] = LEARNING_RATES["adamw"]
"""Those that are compared; the plans after `frontier` have the middle one."""


@dataclass(frozen=True)
class Choices:
    """What the command line chooses.

    Attributes:
        rates: Learning rates by optimizer, or by optimizer and k, like `muon` or `muon:k8`.
        optimizers: The optimizers of lr and frontier; the first is that of parts, model and long.
        seeds: The seeds of every training.
        long_epochs: The epochs of the plan long.
        sequences: The sequences per update.
        train_tokens: The tokens that the training split is cut to; 0 does not cut it.
    """

    rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    optimizers: Sequence[str] = OPTIMIZERS
    seeds: Sequence[int] = (0,)
    long_epochs: int = 4
    sequences: int = SEQUENCES
    train_tokens: int = 0

    def all_rates(self, optimizer: str, k: int) -> tuple[float, ...]:
        """Return the learning rates that lr and frontier compare."""
        return self.rates.get(f"{optimizer}:k{k}") or self.rates.get(optimizer) or LEARNING_RATES[optimizer]

    def usual_rates(self, optimizer: str, k: int) -> tuple[float, ...]:
        """Return the learning rates of the other plans: those given, or the middle one of the usual ones."""
        given = self.rates.get(f"{optimizer}:k{k}") or self.rates.get(optimizer)
        return given or LEARNING_RATES[optimizer][1:2]


def parse_rates(texts: Iterable[str]) -> dict[str, tuple[float, ...]]:
    """Parse learning rates like `adamw=1e-3,2e-3` and `muon:k8=2e-3`."""
    found = {}
    for text in texts:
        key, _, values = text.partition("=")
        optimizer, _, k = key.partition(":")
        numbers = [k.removeprefix("k")] if k else []
        try:
            rates = tuple(float(value) for value in values.split(","))
        except ValueError:
            rates = ()
        if optimizer not in LEARNING_RATES or not all(n.isdigit() for n in numbers) or not rates or min(rates) <= 0:
            raise ValueError(
                f"--lr has {text!r}: give OPTIMIZER=LR,… or OPTIMIZER:kK=LR,…, like adamw=1e-3,2e-3 muon:k8=2e-3, with "
                f"one of {', '.join(LEARNING_RATES)}"
            )
        found[key] = rates
    return found


Make = Callable[..., list[Trial]]


def _maker(choices: Choices, every_rate: bool = False) -> Make:
    """Return a function that makes one training for each learning rate and seed."""
    rates = choices.all_rates if every_rate else choices.usual_rates
    size = {"sequences": choices.sequences, "train_tokens": choices.train_tokens}

    def make(optimizer: str, kind: str, k: int, **more: object) -> list[Trial]:
        assert kind in METHODS
        return [
            Trial(optimizer, kind, k, lr=lr, seed=seed, **size, **more)  # type: ignore[arg-type]
            for seed in choices.seeds
            for lr in rates(optimizer, k)
        ]

    return make


def _lr(choices: Choices) -> list[Trial]:
    make = _maker(choices, every_rate=True)
    return [trial for optimizer in choices.optimizers for trial in make(optimizer, "backprop", 1)]


def _frontier(choices: Choices) -> list[Trial]:
    make = _maker(choices, every_rate=True)
    kinds = [("backprop", 1), ("exact", EXACT_K), *(("petra", k) for k in reversed(KS))]
    return [trial for optimizer in choices.optimizers for kind in kinds for trial in make(optimizer, *kind)]


def _parts(choices: Choices) -> list[Trial]:
    make, optimizer = _maker(choices), choices.optimizers[0]
    kinds = ("petra", "petra-stashed", "delayed")  # with k > 1, the ticks of the last two are not captured: slow
    return [trial for k in (1, 8, 32) for kind in kinds for trial in make(optimizer, kind, k)]


def _warm(choices: Choices) -> list[Trial]:
    """Warm starts, also with smaller learning rates for late stages after them.

    `damp` divides the learning rate by 1 + c·τ, τ being the mean delay in updates. `reschedule` divides it by τ where
    τ > 1, so it acts for k < 8 only. `shrink` would change nothing: these optimizers divide gradients by their size.
    """
    make = _maker(choices)
    plan = []
    for optimizer in ("adamw", "muon"):
        for k, flush in ((k, flush) for k in (8, 1) for flush in (0, 100, 200, 400)):
            plan += make(optimizer, "petra", k, flush=flush)
        for k, flush in ((k, flush) for k in (8, 1) for flush in (0, 200)):
            for corrections in ("damp:1", "damp:4", "damp:16"):
                plan += make(optimizer, "petra", k, flush=flush, corrections=corrections)
        for flush in (0, 200):
            plan += make(optimizer, "petra", 1, flush=flush, corrections="reschedule:800")
    return plan


def _predict(choices: Choices) -> list[Trial]:
    make = _maker(choices)
    plan = []
    for k in (8, 16, 32):
        for optimizer, momentum in (
            ("adamw", None),  # 0.9
            ("adamw", 0.98),
            ("muon", 0.9),
            ("muon", 0.98),
            ("nadamw", None),  # 0.99
        ):
            for corrections in (None, "predict:1", "predict:2"):
                plan += make(optimizer, "petra", k, momentum=momentum, corrections=corrections)
    return plan


NETWORKS = (
    ("qk_norm", "false"),
    ("embedding_norm", "true"),
    ("residual_scale", "0.5"),
    ("residual_scale", "0.25"),
    ("norm", "layernorm"),
)
"""Options of the network that may make delay harmless; the preset has QK-norm, RMSNorm and none of the others."""


def _model(choices: Choices) -> list[Trial]:
    make, optimizer = _maker(choices), choices.optimizers[0]
    plan = []
    for kind, k in (("petra", 8), ("backprop", 1)):  # backprop too, because each network has its own loss
        plan += make(optimizer, kind, k)
        for option in NETWORKS:
            plan += make(optimizer, kind, k, model=(option,))
    return plan


def _long(choices: Choices) -> list[Trial]:
    make, optimizer = _maker(choices), choices.optimizers[0]
    kinds = (("backprop", 1), ("exact", EXACT_K), ("petra", 32), ("petra", 16), ("petra", 8))
    return [trial for kind in kinds for trial in make(optimizer, *kind, epochs=choices.long_epochs)]


PLANS: dict[str, Callable[[Choices], list[Trial]]] = {
    "lr": _lr,
    "frontier": _frontier,
    "parts": _parts,
    "warm": _warm,
    "predict": _predict,
    "model": _model,
    "long": _long,
}
"""All plans by name."""
QUESTIONS = {
    "lr": "Which learning rate does backprop need?",
    "frontier": "How does the loss depend on k?",
    "parts": "Which part of PETRA hurts: the delay, the missing weights, or the missing inputs?",
    "warm": "How many updates with exact gradients does a start need?",
    "predict": "Does weight prediction help, how far ahead, and with how much momentum?",
    "model": "Which options of the network make delay harmless?",
    "long": "How large is the difference after more training?",
}
