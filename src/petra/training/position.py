"""Where a run is, and what it has seen so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

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

    def __post_init__(self) -> None:
        # Loss, right answers and samples on the device, if these are ahead.
        self._sums: list[Tensor] | None = None

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.trained / self.seconds if self.seconds else 0.0

    def count(self, finished: list[Finished]) -> None:
        """Add micro-batches that have reached the loss to the epoch's figures; `read` has them in numbers.

        Until then sums stay on the device: to read them at every tick would make the host wait for it.
        """
        for f in finished:
            if f.weight == 0:
                continue
            if self._sums is None:
                place = f.loss.device
                counts = [torch.full((), n, dtype=torch.int64, device=place) for n in (self.correct, self.samples)]
                self._sums = [torch.full((), self.loss, dtype=torch.float64, device=place), *counts]
            answers = count_answers(f.outputs, f.targets, len(f.targets))
            self._sums[0].add_(f.loss.double() * answers)
            if (correct := count_correct(f.outputs, f.targets)) is not None:
                self._sums[1].add_(correct)
            self._sums[2].add_(answers)

    def read(self) -> None:
        """Bring ``loss``, ``correct`` and ``samples`` up to date, which waits for the device."""
        if self._sums is not None:
            self.loss, self.correct, self.samples = float(self._sums[0]), int(self._sums[1]), int(self._sums[2])

    def start_epoch(self) -> None:
        """Begin to count anew."""
        self.batch, self.loss, self.correct, self.samples, self._sums = 0, 0.0, 0, 0, None


class Watch:
    """Adds wall time to a position: that of training and its data, not that of evaluations and checkpoints.

    A GPU is waited for where it starts and stops. The time of a single tick says nothing there, for a tick is only
    launched when it returns.
    """

    def __init__(self, position: Position, device: torch.device) -> None:
        self._position, self._device = position, device
        self._began = 0.0

    def start(self) -> None:
        """Begin, or go on."""
        self._wait()
        self._began = time.perf_counter()

    def lap(self) -> None:
        """Add the time since the last call."""
        now = time.perf_counter()
        self._position.seconds += now - self._began
        self._began = now

    def stop(self) -> None:
        """Add the time since the last call, all work included."""
        self._wait()
        self.lap()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
