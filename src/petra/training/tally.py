"""What an evaluation adds up, batch by batch and over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from petra.execution import Transport
from petra.training.loss import count_answers, count_correct


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and accuracy over a data set; the accuracy is None where it has no meaning.

    Where every sample has many targets, as the tokens of a text, both are means over all of them.
    """

    loss: float
    accuracy: float | None
    samples: int


class Tally:
    """Sums over batches. They stay on the device: to read them at every batch would make the host wait for it."""

    def __init__(self) -> None:
        self._loss: Any = 0.0
        self._correct: Any = 0
        self._answers: Any = 0
        self._samples = 0
        self._classifies = True

    def add(self, loss: Tensor, outputs: Any, targets: Any, samples: int) -> None:
        """Count a batch, of which ``loss`` is the mean."""
        self._samples += samples
        count = count_answers(outputs, targets, samples)
        self._answers = self._answers + count
        share = loss.double() * count
        # The mean of no answers at all is not a number, and would make the sum none.
        self._loss = self._loss + (share.where(count > 0, 0.0) if isinstance(count, Tensor) else share)
        right = count_correct(outputs, targets)
        self._classifies = self._classifies and right is not None
        self._correct = self._correct + (0 if right is None else right)

    def result(self, transport: Transport) -> Evaluation:
        """Of what all processes have counted; each of them asks for it."""
        own = [float(self._loss), int(self._correct), not self._classifies, int(self._answers), self._samples]
        loss, *counts = transport.total(own)
        correct, others, answers, samples = (int(count) for count in counts)
        if answers == 0:
            raise ValueError("there is nothing to evaluate: the batches are empty, or all their targets are negative")
        return Evaluation(loss / answers, correct / answers if others == 0 else None, samples)
