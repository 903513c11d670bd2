"""Which method, schedule, number of micro-batches and learning rate to use: the rules of `petra advise`.

Every reason names the measurement that it rests on, or says that it is a rule of thumb. The same rules are in
docs/guides/choose.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from petra.methods import find
from petra.schedule import PipelineSchedule
from petra.trainer import optimizers
from petra.trainer.schedules import choose_schedule
from petra.trainer.stability import MICROBATCHES_PER_STAGE, largest_lr

Kind = Literal["convolutional", "transformer"]
KINDS: tuple[Kind, ...] = ("convolutional", "transformer")

ENOUGH_UPDATES = 5000
"""Updates with which k = 8 is chosen for convolutional networks: 9,800 were enough and 733 at k = 32 too few."""
MUON_LR, ADAMW_LR = 2e-3, 1e-3


@dataclass(frozen=True)
class Situation:
    """The network, the data and the hardware to choose for."""

    kind: Kind
    reversible: bool
    """True if the network has reversible layers."""
    devices: int
    layers: int | None = None
    """The number of layers; None if it is not known."""
    batch_size: int = 64
    """Samples in a micro-batch."""
    microbatches: int | None = None
    """Micro-batches in the whole training; None if it is not known."""
    max_accumulate: int | None = None
    """The largest number of micro-batches per update."""
    text: bool = False
    """True if the data is text."""


@dataclass(frozen=True)
class Choice:
    """One way to train."""

    name: str
    """A short description."""
    method: str
    stages: int
    accumulate: int
    optimizer: str
    lr: float
    schedule: str | None = None
    """The schedule; None for that of the method."""
    corrections: tuple[str, ...] = ()
    devices: int = 1
    batch_size: int = 64
    reasons: tuple[str, ...] = field(default=())
    """Reasons, each with its source."""

    @property
    def pipeline(self) -> PipelineSchedule:
        """The schedule."""
        return choose_schedule(find(self.method), self.stages, self.accumulate, self.schedule, ranks=self.devices)

    @property
    def idle(self) -> float:
        """The share of time in which a device waits, if all stages take the same time."""
        if self.devices == 1 or not self.pipeline.exact:
            return 0.0
        work = self.accumulate * (self.stages // self.devices if self.schedule == "interleaved" else 1)
        return (self.devices - 1) / (work + self.devices - 1)

    @property
    def delay(self) -> float:
        """The mean number of updates by which the gradients of the first stage are late."""
        return 0.0 if self.pipeline.exact else self.pipeline.delay(0)

    def options(self) -> dict[str, Any]:
        """Return the choice as options of `petra train`, by field name.

        Returns:
            The options whose values matter.
        """
        found = {
            "method": self.method,
            "stages": self.stages,
            "schedule": self.schedule,
            "accumulate": self.accumulate,
            "batch_size": self.batch_size,
            "optimizer": self.optimizer,
            "lr": self.lr,
            "corrections": self.corrections,
        }
        return {name: value for name, value in found.items() if value not in (None, ())}


def choices(situation: Situation) -> list[Choice]:
    """Return the ways to train in a situation, the recommended one first; memory is not considered.

    Args:
        situation: The situation.

    Returns:
        At least one choice.

    Raises:
        ValueError: If there are more devices than layers.
    """
    found = situation
    if found.layers is not None and found.devices > found.layers:
        raise ValueError(
            f"there are {found.devices} devices, but the network has only {found.layers} layers: give at most "
            f"{found.layers}, or a deeper network"
        )
    if found.devices == 1:
        return list(_one_device(found))
    if not found.reversible:
        return list(_not_reversible(found))
    return list(_transformer(found) if found.kind == "transformer" else _convolutional(found))


def _one_device(at: Situation) -> Iterator[Choice]:
    optimizer, why = _exact_optimizer(at)
    lr = _lr(at, optimizer, 1)
    yield Choice(
        "backprop", "backprop", 1, 1, optimizer, lr, batch_size=at.batch_size,
        reasons=("fastest on one device, if the activations fit (docs/results/speed.md)", why),
    )  # fmt: skip
    if at.reversible:
        yield Choice(
            "reversible backprop", "reversible", 1, 1, optimizer, lr, batch_size=at.batch_size,
            reasons=(
                "exact gradients without stored activations: Rev-ViT-L at batch 64 takes 6.9 GiB and 86 ms instead of "
                "15.0 GiB and 66 ms (docs/results/speed.md)",
                why,
            ),
        )  # fmt: skip


def _not_reversible(at: Situation) -> Iterator[Choice]:
    optimizer, why = _exact_optimizer(at)
    k = _limited(at, 4 * at.devices)
    yield Choice(
        "exact pipeline", "backprop", at.devices, k, optimizer, _lr(at, optimizer, k), "1f1b",
        devices=at.devices, batch_size=at.batch_size,
        reasons=(
            "no layer is reversible, so PETRA would store the inputs of all stages and compute them again; make the "
            "blocks reversible to save memory (petra.make_reversible, docs/guides/conversion.md)",
            why,
        ),
    )  # fmt: skip


def _convolutional(at: Situation) -> Iterator[Choice]:
    many = at.microbatches is not None and at.microbatches // 8 >= ENOUGH_UPDATES
    k = _limited(at, 8) if many else 1
    corrections = () if k == 8 else ("predict", "inertia:4")
    reasons = [
        "no device waits, and late gradients cost convolutional networks little",
        "RevNet-18 on CIFAR-10, k = 8, 100 epochs: 94.2 % with PETRA, 94.3 % with backprop (docs/results/petra.md)"
        if not corrections
        else "RevNet-18 on CIFAR-10, k = 1, 30 epochs: 92.1 % with these corrections, 91.6 % without, 92.4 % with "
        "backprop (docs/results/petra.md)",
    ]
    if at.microbatches is None and corrections:
        reasons.append("with --data and --epochs, a long training gets k = 8 (733 updates were too few for k = 32)")
    elif corrections:
        reasons.append(
            "the training is too short for k = 8: 733 updates were too few at k = 32 (docs/results/petra.md)"
        )
    yield Choice(
        "PETRA", "petra", at.devices, k, "sgd", _lr(at, "sgd", k, at.devices, corrections), "low-staleness",
        corrections, at.devices, at.batch_size, (*reasons, _lr_reason(corrections)),
    )  # fmt: skip
    k = _limited(at, 4 * at.devices)
    yield Choice(
        "exact pipeline", "petra", at.devices, k, "sgd", _lr(at, "sgd", k), "1f1b",
        devices=at.devices, batch_size=at.batch_size,
        reasons=("exact gradients at the same memory; the bubble shrinks with k (docs/guides/transformers.md)",),
    )  # fmt: skip


def _transformer(at: Situation) -> Iterator[Choice]:
    stages, k, schedule = at.devices, _limited(at, 4 * at.devices), "1f1b"
    bubble = "exact gradients; k = 4J leaves 18 % of idle time with eight stages, and k does not change the memory of "
    bubble += "reversible stages (docs/guides/transformers.md)"
    deep = at.layers is not None and at.layers >= 2 * at.devices
    if k < 4 * at.devices and deep and k >= at.devices:
        stages, schedule, k = 2 * at.devices, "interleaved", k - k % at.devices
        bubble = "k cannot be 4J: two stages per device halve the bubble (docs/concepts/schedules.md)"
    optimizer, why = _exact_optimizer(at)
    yield Choice(
        "exact pipeline", "petra", stages, k, optimizer, _lr(at, optimizer, k), schedule,
        devices=at.devices, batch_size=at.batch_size, reasons=(bubble, why),
    )  # fmt: skip
    k = _limited(at, MICROBATCHES_PER_STAGE["muon"] * at.devices)
    reason = "no device waits; GPT of 24M parameters, eight stages, Muon: test loss 0.005 nats behind backprop at k = "
    reason += "2J, 0.023 at k = J, 0.6 at k = 1 (experiments/language)"
    if k < MICROBATCHES_PER_STAGE["muon"] * at.devices:
        reason = "k is less than 2J: not recommended. " + reason
    yield Choice(
        "PETRA", "petra", at.devices, k, "muon", MUON_LR if k >= at.devices else MUON_LR / 2, "low-staleness",
        devices=at.devices, batch_size=at.batch_size,
        reasons=(reason, "AdamW needs k = 4J or more with late gradients (experiments/language)"),
    )  # fmt: skip


def _exact_optimizer(at: Situation) -> tuple[str, str]:
    if at.kind == "convolutional":
        return "sgd", _lr_reason(())
    if at.text:
        return "muon", "Muon at lr 2e-3: test loss 4.13, AdamW 4.35 (GPT of 24M parameters, experiments/language)"
    return "adamw", f"AdamW at lr {ADAMW_LR:g} is a rule of thumb; divide it for large batches or small data"


def _lr(at: Situation, optimizer: str, k: int, stages: int = 1, corrections: tuple[str, ...] = ()) -> float:
    if optimizer != "sgd":
        return MUON_LR if optimizer == "muon" else ADAMW_LR
    rule = optimizers.base_learning_rate(at.batch_size, k)
    if corrections or stages == 1:
        return rule
    return min(rule, largest_lr(choose_schedule(find("petra"), stages, k), 0.9))


def _lr_reason(corrections: tuple[str, ...]) -> str:
    rule = "lr is 0.1 for 256 samples per update, in proportion to their number (the PETRA paper's rule)"
    return rule if corrections else f"{rule}, and lr/(1 - m)·τ stays below 5 (benchmarks/guidance)"


def _limited(at: Situation, k: int) -> int:
    return k if at.max_accumulate is None else min(k, at.max_accumulate)
