"""Loss and accuracy over a data set, with a trainer or without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from petra.distributed import SingleProcess, Transport
from petra.methods import Settings, find
from petra.pipeline import Executor, LocalMailbox, MessageFormat, StageBuilder, partition
from petra.pipeline.stage import Loss
from petra.reversible.streams import Streams, as_streams, channels_last, single
from petra.schedule import SequentialSchedule
from petra.trainer.loss import count_answers, count_correct

Batches = Iterable[tuple[Tensor | Streams, Any]]


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and accuracy over a data set.

    Where every sample has many targets, such as the tokens of a text, both are means over all targets.
    """

    loss: float
    accuracy: float | None
    """The share of correct answers; None where the targets are not classes."""
    samples: int


def evaluate(
    predict: Callable[[Any], Any], batches: Batches, loss: Loss, device: torch.device, transport: Transport
) -> Evaluation:
    """Compute loss and accuracy of batches. All ranks call this together.

    Args:
        predict: Returns the outputs for inputs; None on ranks that do not have them.
        batches: Inputs and targets.
        loss: The loss.
        device: The device of the outputs.
        transport: Connects the ranks.

    Returns:
        The result over the batches of all replicas.
    """
    sums = EvaluationSums()
    for x, y in batches:
        outputs, targets = predict(x), to_device(y, device)
        if outputs is not None:
            size = len(y) if isinstance(y, Tensor) and y.ndim else len(as_streams(x)[0])
            sums.add(loss(outputs, targets), outputs, targets, size)
    transport.flush()
    return sums.result(transport)


@torch.no_grad()
def evaluate_network(
    network: nn.Sequential,
    batches: Batches,
    loss: Loss,
    *,
    stages: int | Sequence[int] = 1,
    autocast: torch.dtype | None = None,
    comm_dtype: str | torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Evaluation:
    """Compute loss and accuracy of a network as a trainer would, without a trainer and its optimizers.

    Args:
        network: The network; it is moved to the device.
        batches: Inputs and targets.
        loss: The loss.
        stages: The number of stages, or the layers of each; they matter where messages are rounded.
        autocast: The dtype of autocast; None for float32.
        comm_dtype: The rounding of messages between stages, as `Trainer` takes it; None for float32.
        device: The device; by default, that of the network.

    Returns:
        Loss and accuracy.
    """
    place = torch.device(device) if device is not None else device_of(network)
    network.to(place)
    cuts = partition(len(network), stages)
    builder = StageBuilder(list(network), find("backprop"), Settings(place, autocast=autocast))
    built = [builder.build(index, len(cuts), cut) for index, cut in enumerate(cuts)]
    format = MessageFormat.of(comm_dtype, any(channels_last(p) for p in network.parameters()))
    executor = Executor(built, SequentialSchedule(len(cuts)), LocalMailbox(len(cuts), format))

    def predict(inputs: Tensor | Streams) -> Any:
        outputs = executor.predict(to_device(as_streams(inputs), place))
        return None if outputs is None else single(outputs)

    return evaluate(predict, batches, loss, place, SingleProcess(place))


class EvaluationSums:
    """Sums over batches. They stay on the device: reading them at every batch would make the host wait."""

    def __init__(self) -> None:
        self._loss: Any = 0.0
        self._correct: Any = 0
        self._answers: Any = 0
        self._samples = 0
        self._classifies = True

    def add(self, loss: Tensor, outputs: Any, targets: Any, samples: int) -> None:
        """Count a batch with this mean loss."""
        self._samples += samples
        count = count_answers(outputs, targets, samples)
        self._answers = self._answers + count
        share = loss.double() * count
        # The mean over no answers is NaN, and would make the sum NaN.
        self._loss = self._loss + (share.where(count > 0, 0.0) if isinstance(count, Tensor) else share)
        right = count_correct(outputs, targets)
        self._classifies = self._classifies and right is not None
        self._correct = self._correct + (0 if right is None else right)

    def result(self, transport: Transport) -> Evaluation:
        """Return the result over all processes, which all call this."""
        own = [float(self._loss), int(self._correct), not self._classifies, int(self._answers), self._samples]
        loss, *counts = transport.total(own)
        correct, others, answers, samples = (int(count) for count in counts)
        if answers == 0:
            why = "all targets of the test batches are negative" if samples else "there are no test batches"
            raise ValueError(f"there is nothing to evaluate, because {why}")
        return Evaluation(loss / answers, correct / answers if others == 0 and correct >= 0 else None, samples)


def to_device(data: Any, device: torch.device, copy: bool = False) -> Any:
    """Return the data with its tensors, also those inside lists and dictionaries, on the device."""
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True, copy=copy)
    return tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True, copy=copy), data)


def device_of(network: nn.Module) -> torch.device:
    """Return the device of the network's weights."""
    tensor = next(network.parameters(), None)
    return tensor.device if tensor is not None else torch.device("cpu")
