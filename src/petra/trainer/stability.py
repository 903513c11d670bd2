"""Warns before training where late gradients and the learning rate make divergence likely.

With a gradient that is τ updates late, one direction of the loss with curvature h is stable up to lr/(1 - m)·h·τ of
about 1.3 for SGD with momentum m (`benchmarks/prediction/stability.py`). Curvatures are not known in advance, but
lr/(1 - m)·τ is: the rules here compare it with trainings that were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, log10
from typing import Any

import torch
from torch import nn

from petra.corrections import Correction, Damp, Inertia
from petra.optim import SOAP, Muon, optimizers_of
from petra.schedule import PipelineSchedule

SGD_LIMIT = 5.0
"""The largest lr/(1 - m)·τ of SGD without a warning.

Trainings of RevNets with 4.5 reach the accuracy of backprop or nearly so (the recipes of the PETRA paper); with 7, the
network of `benchmarks/guidance` stays at the level of guessing, and with 8.5, two RevNets lose 1 to 4 points
(experiments/cifar10, benchmarks/prediction).
"""
SGD_SAFE = 1.5
"""The lr/(1 - m)·τ of the learning rates that warnings recommend: the recipe `digits`, `benchmarks/guidance`."""
SGD_LIMIT_WITH_INERTIA = 20.0
"""The same with `predict,inertia:4`, which tolerates about ten times the curvature in theory."""
SGD_START_LIMIT = 4.0
"""The largest lr/(1 - m)·τ of the first updates: without a warm-up."""
MICROBATCHES_PER_STAGE = {"muon": 2, "adam": 4, "sgd": 4}
"""The smallest k of a transformer without a warning, as a multiple of the number of stages J (experiments/language).

With Muon, k = 2J loses 0.01 nats, J 0.035 and J/2 0.13; SOAP counts as Muon. With AdamW, 4J loses 0.05 nats, 2J 0.4 and
J 1.1. SGD was not measured; it is assumed to be no better than AdamW.
"""
LARGEST_ACCUMULATE = 128
"""The largest k that warnings recommend for SGD. If more would be needed, they recommend a lower learning rate only."""
WARMUP = 200
"""Updates of linear warm-up that are enough in benchmarks/guidance."""
_FOREVER = 2**62


class StalenessWarning(UserWarning):
    """Late gradients make it likely that a training diverges or learns nothing."""


@dataclass(frozen=True)
class Steps:
    """The steps of an optimizer as the rules see them."""

    family: str
    """`sgd`, `adam` or `muon` (also SOAP); empty for others, for which there are no rules."""
    lr: float
    """The highest learning rate that is known: that of now, or the one to which a scheduler rises."""
    first_lr: float
    """The learning rate of the first update."""
    momentum: float
    """The momentum of SGD."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Steps:
        """Read the settings of an optimizer, after a scheduler has set its first learning rate."""
        peak, first, momentum = 0.0, 0.0, 0.0
        for group in optimizer.param_groups:
            known = [float(group[name]) for name in ("lr", "initial_lr", "max_lr") if group.get(name) is not None]
            if known and max(known) >= peak:
                peak, first, momentum = max(known), float(group["lr"]), float(group.get("momentum", 0.0))
        return cls(_family(optimizer), peak, first, momentum)

    @property
    def effective_lr(self) -> float:
        """The total effect of a gradient on the weights."""
        return self.lr / (1 - self.momentum)

    @property
    def warm_up(self) -> bool:
        """True if the learning rate rises."""
        return self.first_lr < 0.5 * self.lr


def known_steps(optimizers: Sequence[torch.optim.Optimizer | None]) -> list[Steps]:
    """Return the steps of all optimizers; where there is Muon, those of other optimizers for the rest are left out.

    Args:
        optimizers: The optimizers of stages.

    Returns:
        The steps.
    """
    found = [Steps.of(one) for optimizer in optimizers for one in optimizers_of(optimizer)]
    return [steps for steps in found if steps.family == "muon"] or found


def _family(optimizer: torch.optim.Optimizer) -> str:
    if isinstance(optimizer, torch.optim.SGD):
        return (
            "sgd" if all(group["dampening"] == 0 and group["momentum"] < 1 for group in optimizer.param_groups) else ""
        )
    if isinstance(optimizer, Muon | SOAP) or type(optimizer).__name__ == "Muon":
        return "muon"
    return "adam" if all("betas" in group for group in optimizer.param_groups) else ""


def is_transformer(network: nn.Module) -> bool:
    """Return whether a network looks like a transformer: it normalises every sample or token, and no batches.

    Args:
        network: The network.

    Returns:
        True if it has layers like LayerNorm, RMSNorm or attention, and no batch norm.
    """
    names = _names(network)
    batch_norm = any("batchnorm" in name for name in names)
    return not batch_norm and any("layernorm" in n or "rmsnorm" in n or "attention" in n for n in names)


def has_attention(network: nn.Module) -> bool:
    """Return whether a network has layers that are named after attention.

    Args:
        network: The network.

    Returns:
        True if it has.
    """
    return any("attention" in name for name in _names(network))


def _names(network: nn.Module) -> set[str]:
    return {type(module).__name__.lower() for module in network.modules()}


def longest_delay(schedule: PipelineSchedule) -> tuple[int, float]:
    """Return the stage whose gradients are latest, and their mean delay in updates after a synchronous start.

    Args:
        schedule: The schedule.

    Returns:
        The stage, and its τ.
    """
    delays = [schedule.delay(stage, _FOREVER) for stage in range(schedule.stages)]
    stage = max(range(len(delays)), key=delays.__getitem__)
    return stage, delays[stage]


def largest_lr(schedule: PipelineSchedule, momentum: float) -> float:
    """Return the largest learning rate of SGD that causes no warning if there is a warm-up; a little less than that.

    Args:
        schedule: The schedule.
        momentum: The momentum of SGD.

    Returns:
        The learning rate; infinity if no gradient is late.
    """
    delay = 0.0 if schedule.exact else longest_delay(schedule)[1]
    return 0.95 * SGD_LIMIT * (1 - momentum) / delay if delay else inf


def staleness_warning(
    optimizers: Sequence[torch.optim.Optimizer | None],
    schedule: PipelineSchedule,
    corrections: Sequence[Correction],
    transformer: bool,
    attention: bool = False,
) -> str | None:
    """Return a warning if late gradients make divergence likely.

    Args:
        optimizers: The optimizer of each stage, or of those stages that are known; the others are taken to be alike.
        schedule: The schedule.
        corrections: The corrections of staleness.
        transformer: True if the network is a transformer.
        attention: True if it has attention. With SGD, only such networks count as transformers.

    Returns:
        One sentence with values and what to change, or None.
    """
    known = known_steps(optimizers)
    if schedule.exact or not known:
        return None
    stage, delay = longest_delay(schedule)
    if not delay:
        return None
    steps = max(known, key=lambda found: found.effective_lr)
    late = f"gradients of stage {stage} are {delay:.3g} updates late"
    if (attention if steps.family == "sgd" else transformer) and (remedy := _transformer_remedy(steps, schedule)):
        return f"{late}, and transformers learn badly from late gradients: {remedy}"
    if steps.family != "sgd":
        return None
    product = steps.effective_lr * delay
    for correction in corrections:
        if isinstance(correction, Damp):
            product /= 1 + correction.factor * delay
    limit = SGD_LIMIT_WITH_INERTIA if _has_inertia(corrections) else SGD_LIMIT
    if product <= (limit if steps.warm_up else limit * SGD_START_LIMIT / SGD_LIMIT):
        return None
    return (
        f"{late}, which makes a learning rate of {steps.lr:g} with momentum {steps.momentum:g}"
        f"{'' if steps.warm_up else ' and no warm-up'} likely to diverge: "
        f"{remedies(steps, schedule, corrections, SGD_SAFE / SGD_LIMIT * limit / product)}"
    )


def _transformer_remedy(steps: Steps, schedule: PipelineSchedule) -> str | None:
    """Return what to change where a transformer has too few micro-batches per update; None if it has enough."""
    least = MICROBATCHES_PER_STAGE.get(steps.family)
    stage, delay = longest_delay(schedule)
    in_flight = schedule.staleness(stage)
    depth = in_flight + 1  # in `low-staleness`, the number of stages
    if least is None or delay <= in_flight / (least * depth):
        return None
    muon = f"accumulate={MICROBATCHES_PER_STAGE['muon'] * depth}"
    choices = muon if steps.family == "muon" else f"Muon and {muon}"
    if steps.family == "adam":
        choices += f", accumulate={least * depth} with Adam"
    return f"give {choices}, or schedule='1f1b' and accumulate={4 * schedule.stages} for exact gradients"


def remedies(
    steps: Steps,
    schedule: PipelineSchedule,
    corrections: Sequence[Correction],
    factor: float,
    defaults: Sequence[str] = (),
) -> str:
    """Return what to change where the product of learning rate and delay has to be smaller by a factor.

    Args:
        steps: The settings of the optimizer.
        schedule: The schedule.
        corrections: The corrections of staleness.
        factor: The factor, less than 1.
        defaults: The names of the corrections that the trainer has chosen because no optimizer was given.

    Returns:
        A list of alternatives, with values.
    """
    found = []
    if steps.family == "sgd" and steps.momentum > 0 and not _has_inertia(corrections):
        found.append("corrections=['predict', 'inertia:4']")
    warm_up = f"an optimizer with lr={_round_down(steps.lr * factor):g} and a warm-up of {WARMUP} updates"
    if defaults:
        warm_up += f" (with corrections={list(defaults)}, because a given optimizer has none)"
    found.append(warm_up)
    if (k := ceil(schedule.accumulate / factor)) <= LARGEST_ACCUMULATE:
        found.append(f"accumulate={k} at the same lr")
    return f"give {', '.join(found)}, or schedule='1f1b' for exact gradients"


def _has_inertia(corrections: Sequence[Correction]) -> bool:
    return any(isinstance(correction, Inertia) for correction in corrections)


def _round_down(value: float) -> float:
    """Round to one significant digit, downwards."""
    scale: Any = 10.0 ** floor(log10(value))
    return float(f"{floor(value / scale + 1e-9) * scale:.1g}")
