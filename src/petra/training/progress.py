"""Progress on the terminal: a bar an epoch, or a line an epoch where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

_PERIOD = 0.5
"""Seconds from one look at the figures to the next: on a GPU, each makes the host wait."""

Figures = Callable[[], tuple[float, int, int, float]]
"""Loss, right answers and samples of the epoch so far, and samples per second."""


class Progress:
    """Shows loss, accuracy and samples per second."""

    def __init__(self, method: str, epochs: int, batches: int, quiet: bool = False) -> None:
        self._method, self._epochs, self._batches = method, epochs, batches
        self._quiet = quiet
        self._live = not quiet and sys.stderr.isatty()
        self._bar: Any = None
        self._next = 0.0  # when figures are looked at

    def start(self, epoch: int, batch: int) -> None:
        """A new epoch, from ``batch`` on."""
        if self._live:
            title = f"{self._method} epoch {epoch + 1}/{self._epochs}"
            self._bar = tqdm(total=self._batches, initial=batch, desc=title, unit="batch", leave=False)

    def step(self, figures: Figures) -> None:
        """One micro-batch more."""
        if self._bar is None:
            return
        if (now := time.monotonic()) >= self._next:
            self._next = now + _PERIOD
            loss, correct, samples, rate = figures()
            if samples:
                text = f"loss {loss / samples:.3f}, accuracy {correct / samples:.1%}, {rate:.0f} samples/s"
                self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()

    def end(self, record: dict[str, Any]) -> None:
        """The epoch is over."""
        self.close()
        if not self._quiet:
            trained = "no micro-batch has reached the loss yet"
            if record["train_loss"] is not None:
                trained = f"loss {record['train_loss']:.3f}, train {record['train_accuracy']:.1%}"
            print(
                f"{self._method} epoch {record['epoch']}/{self._epochs}: {trained}, "
                f"test {record['test_accuracy']:.1%} (loss {record['test_loss']:.3f}), "
                f"{record['samples_per_second']:.0f} samples/s",
                file=sys.stderr,
            )

    def say(self, text: str) -> None:
        """Show a text without disturbing the bar."""
        if not self._quiet:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """Leave the terminal clean."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
