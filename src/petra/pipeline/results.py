"""Results of micro-batches, and errors raised by losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra.reversible.graph_leaks import GraphLeaks
from petra.reversible.streams import Streams


class Diverged(RuntimeError):
    """Training diverged: a loss or a weight is NaN or infinite."""


class NonFiniteLoss(Diverged):
    """The loss of a micro-batch is NaN or infinite. No weights were updated with its gradient.

    Stages that predict their gradients (DNI) were updated with predictions before the loss was computed.
    """


@dataclass(frozen=True)
class MicrobatchResult:
    """A micro-batch that has reached the loss."""

    microbatch: int
    loss: Tensor
    outputs: Any
    targets: Any
    weight: float = 1.0
    """The weight of its gradient in the mean over replicas; 0 for a replica that has no samples of it."""


def check_finite(loss: Tensor, microbatch: int, stage: int, consequence: str) -> None:
    """Raise `NonFiniteLoss` if the loss is NaN or infinite."""
    if not torch.isfinite(loss):
        raise NonFiniteLoss(
            f"training diverged: the loss of micro-batch {microbatch} on stage {stage} is {float(loss)}; "
            f"{consequence}: lower the learning rate, clip gradients (clip_norm), or look for NaN in the data"
        )


def check_loss(loss: Tensor, outputs: Streams) -> None:
    """Raise ValueError if the loss depends on tensors other than the outputs of the network."""
    if not loss.requires_grad:
        raise ValueError(
            "the loss does not depend on the outputs of the network: is there a detach() or a rounding in it?"
        )
    found = GraphLeaks(outputs).find_leak((loss,))
    if found is not None:
        raise ValueError(
            f"the loss depends on a tensor of shape {tuple(found.shape)} that is not an output of the network, so its "
            "gradient would be lost: use it in a layer, use weight_decay of the optimizer, or detach it"
        )
