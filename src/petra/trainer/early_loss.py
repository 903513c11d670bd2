"""The loss of the first micro-batch, checked before the pipeline is full."""

from __future__ import annotations

from typing import Any

import torch

from petra.distributed import RankMailbox
from petra.pipeline import Executor
from petra.pipeline.message_shapes import shapes_of
from petra.pipeline.results import evaluate_loss
from petra.pipeline.stage import Loss
from petra.reversible.streams import Streams, single
from petra.trainer.evaluation import to_device


def check_loss_early(executor: Executor, loss: Loss, device: torch.device, streams: Streams, targets: Any) -> None:
    """Raise ValueError if the loss does not fit to the outputs and targets of a micro-batch.

    In a pipeline, the first micro-batch reaches the loss many ticks later, when others follow it.

    Args:
        executor: The executor; nothing in it changes.
        loss: The loss.
        device: The device of the network.
        streams: The inputs of the network.
        targets: The targets.

    Raises:
        ValueError: If the loss fails, or is not one number.
    """
    if not executor.stages[-1].last or any(0 in x.shape for x in streams):
        return
    outputs = _outputs(executor, device, streams)
    if outputs is not None:
        with torch.no_grad():
            evaluate_loss(loss, single(outputs), to_device(targets, device))


def _outputs(executor: Executor, device: torch.device, streams: Streams) -> Streams | None:
    """Return outputs of the right shapes: zeros on ranks, which do not have all layers."""
    if isinstance(executor.mailbox, RankMailbox):
        found = executor.mailbox.network_outputs(shapes_of(streams))
        return tuple(torch.zeros(x.shape, dtype=x.dtype, device=device) for x in found)
    try:
        return executor.predict(to_device(streams, device))
    except (RuntimeError, ValueError, TypeError):  # the tick will tell, if it fails in training mode too
        return None
