"""The progress of a training: its position, its metrics so far, and its training time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from petra.pipeline import MicrobatchResult
from petra.trainer.loss import count_answers, count_correct


@dataclass
class RunProgress:
    """The position and the metrics of a training; a checkpoint stores them next to the state of the trainer.

    `loss` and `correct` are sums over `samples` since the last evaluation; each token of a text counts as one sample.
    `correct` is negative if the outputs do not tell which answers are correct: targets that are not classes, or a
    network whose loss computes the logits (`chunked_loss`). `logged` are the three sums at the last record of
    `log_every`. `captured_ticks` were launched as CUDA graphs.
    """

    epoch: int = 0
    batch: int = 0
    """The micro-batches of the epoch so far."""
    microbatches: int = 0
    """All micro-batches so far."""
    loss: float = 0.0
    correct: int = 0
    samples: int = 0
    logged: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    best: float | None = None
    """The best value of the monitored metric."""
    best_accuracy: float = -1.0
    """The test accuracy of the best weights."""
    best_epoch: float = 0
    best_step: int = 0
    best_sha256: str | None = None
    """The hash of the best weights; None if there are none, or in a checkpoint of an older version."""
    stale_evaluations: int = 0
    """The evaluations since the monitored metric last improved by more than `min_delta`."""
    reference: float | None = None
    """The value that it has to improve on."""
    test_loss: float = 0.0
    test_accuracy: float | None = 0.0
    ema_test_loss: float | None = None
    ema_test_accuracy: float | None = None
    evaluated_at: int = -1
    """The micro-batch of the last evaluation; -1 if there was none, or the weights have changed since."""
    seconds: float = 0.0
    trained: int = 0
    captured_ticks: int = 0
    stopped_early: bool = False
    finished: bool = False
    memory: list[dict[str, int]] = field(default_factory=list)
    activation_peak: int = 0

    def __post_init__(self) -> None:
        # Loss, correct answers and samples on the device, which may be newer than the fields.
        self._sums: list[Tensor] | None = None

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.trained / self.seconds if self.seconds else 0.0

    def count(self, finished: list[MicrobatchResult]) -> None:
        """Add micro-batches that have reached the loss to the sums.

        The sums stay on the device until `read` is called: reading them at every tick would make the host wait.

        Args:
            finished: The results of the micro-batches.
        """
        for f in finished:
            if f.weight == 0:
                continue
            if self._sums is None:
                device = f.loss.device
                counts = [torch.full((), n, dtype=torch.int64, device=device) for n in (self.correct, self.samples)]
                self._sums = [torch.full((), self.loss, dtype=torch.float64, device=device), *counts]
            answers = count_answers(f.outputs, f.targets, _samples(f))
            self._sums[0].add_(f.loss.double() * answers)
            correct = count_correct(f.outputs, f.targets)
            if correct is None:
                self._sums[1].fill_(-1)
            else:
                self._sums[1].add_(correct)
            self._sums[2].add_(answers)

    def read(self) -> None:
        """Update `loss`, `correct` and `samples` from the device, which waits for it."""
        if self._sums is not None:
            self.loss, self.samples = float(self._sums[0]), int(self._sums[2])
            self.correct = max(int(self._sums[1]), -1)

    def of_rank(self, is_main: bool) -> RunProgress:
        """Return the progress of a rank that continues from a checkpoint.

        The sums there are those of all replicas, so only one rank continues them.

        Args:
            is_main: Whether this is that rank.

        Returns:
            The progress.
        """
        return self if is_main else replace(self, loss=0.0, correct=0, samples=0)

    def reset_sums(self) -> None:
        """Set the sums to zero, after an evaluation."""
        self.loss, self.correct, self.samples, self._sums = 0.0, 0, 0, None
        self.logged = [0.0, 0.0, 0.0]


class ThroughputTimer:
    """Adds the time of training and data to the progress, without that of evaluations and checkpoints.

    It waits for the GPU when it starts and stops: when a tick returns, the GPU may not have finished it.

    Args:
        progress: The progress whose `seconds` it adds to.
        device: The device to wait for.
    """

    def __init__(self, progress: RunProgress, device: torch.device) -> None:
        self._progress, self._device = progress, device
        self._started = 0.0

    def start(self) -> None:
        """Start, or continue."""
        self._wait()
        self._started = time.perf_counter()

    def lap(self) -> None:
        """Add the time since the last call."""
        now = time.perf_counter()
        self._progress.seconds += now - self._started
        self._started = now

    def stop(self) -> None:
        """Wait for the device, and add the time since the last call."""
        self._wait()
        self.lap()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _samples(result: MicrobatchResult) -> int:
    """Return the number of samples of a micro-batch."""
    targets = result.targets
    if isinstance(targets, Tensor) and targets.ndim:
        return len(targets)
    return len(next(x for x in tree_leaves((targets, result.outputs)) if isinstance(x, Tensor) and x.ndim))
