"""Results of micro-batches, and errors raised by losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from petra.formatting import first_line
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


def evaluate_loss(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> Tensor:
    """Call the loss.

    Args:
        loss: The function.
        outputs: The outputs of the network.
        targets: The targets.

    Returns:
        The loss, which is one number.

    Raises:
        TypeError: If it is not a tensor.
        ValueError: If it is not one number, or the function fails; the message names the shapes.
    """
    try:
        found = loss(outputs, targets)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        if isinstance(error, torch.OutOfMemoryError | Diverged) or str(error).startswith("the loss "):
            raise
        raise ValueError(
            f"the loss fails on outputs of {_shapes(outputs)} and targets of {_shapes(targets)}: "
            f"{first_line(error)}{_hint(outputs, targets)}"
        ) from error
    if not isinstance(found, Tensor):
        raise TypeError(f"the loss returns {type(found).__name__}: return one number, as a tensor")
    if found.numel() != 1:
        raise ValueError(f"the loss has shape {tuple(found.shape)}: return one number, such as the mean over samples")
    return found


def _shapes(data: Any) -> str:
    if isinstance(data, Tensor):
        return f"shape {tuple(data.shape)}"
    shapes = [str(tuple(x.shape)) for x in tree_leaves(data) if isinstance(x, Tensor)]
    return f"shapes {', '.join(shapes)}" if shapes else f"type {type(data).__name__}"


def _hint(outputs: Any, targets: Any) -> str:
    """Return the remedy for classes in the last dimension, which PyTorch expects in the second one."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or targets.is_floating_point():
        return ""
    if outputs.ndim < 3 or outputs.shape[:-1] != targets.shape:
        return ""
    last = outputs.ndim - 2
    return (
        "; cross_entropy expects the classes in the second dimension, so give loss=lambda outputs, targets: "
        f"cross_entropy(outputs.flatten(0, {last}), targets.flatten())"
    )


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
