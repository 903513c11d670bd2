"""Where a run is, and what it has seen so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from petra.execution import Finished
from petra.training.loss import count_answers, count_correct


@dataclass
class Position:
    """Where a run is and what it has seen: what a checkpoint adds to the trainer's state.

    ``samples`` are those that ``loss`` and ``correct`` are sums over; in a text each of its tokens counts for one.
    ``replayed`` are ticks that a GPU has repeated from a recording.
    """

    epoch: int = 0
    batch: int = 0
    loss: float = 0.0
    correct: int = 0
    samples: int = 0
    best_accuracy: float = -1.0
    best_epoch: int = 0
    test_loss: float = 0.0
    test_accuracy: float = 0.0
    seconds: float = 0.0
    trained: int = 0
    replayed: int = 0
    finished: bool = False
    memory: list[dict[str, int]] = field(default_factory=list)
    activation_peak: int = 0

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.trained / self.seconds if self.seconds else 0.0

    def count(self, finished: list[Finished]) -> None:
        """Add micro-batches that have reached the loss to the epoch's figures."""
        for f in finished:
            if f.weight == 0:
                continue
            answers = count_answers(f.outputs, f.targets)
            self.loss += float(f.loss) * answers
            self.correct += int(count_correct(f.outputs, f.targets) or 0)
            self.samples += answers
