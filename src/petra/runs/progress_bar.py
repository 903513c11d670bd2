"""Progress on the terminal: one bar per epoch, or one line per epoch without a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

_PERIOD = 0.5
"""Seconds between updates of the displayed values, because each synchronizes with the GPU."""

Figures = Callable[[], tuple[float, int, int, float]]
"""Returns the loss, correct answers (negative if unknown) and samples of the epoch so far, and samples per second."""


class ProgressBar:
    """Shows loss, accuracy and samples per second.

    Args:
        method: The name of the method.
        epochs: The number of epochs.
        batches: The number of micro-batches in an epoch.
        quiet: Print nothing.
    """

    def __init__(self, method: str, epochs: int, batches: int, quiet: bool = False) -> None:
        self._method, self._epochs, self._batches = method, epochs, batches
        self._quiet = quiet
        self._live = not quiet and sys.stderr.isatty()
        self._bar: Any = None
        self._next = 0.0  # the time of the next reading

    def start(self, epoch: int, batch: int) -> None:
        """Start an epoch at micro-batch `batch`."""
        if self._live:
            title = f"{self._method} epoch {epoch + 1}/{self._epochs}"
            self._bar = tqdm(total=self._batches, initial=batch, desc=title, unit="batch", leave=False)

    def step(self, figures: Figures) -> None:
        """Advance by one micro-batch."""
        if self._bar is None:
            return
        if (now := time.monotonic()) >= self._next:
            self._next = now + _PERIOD
            loss, correct, samples, rate = figures()
            if samples:
                accuracy = f", accuracy {correct / samples:.1%}" if correct >= 0 else ""
                text = f"loss {loss / samples:.3f}{accuracy}, {rate:.0f} samples/s"
                self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()

    def end(self, record: dict[str, Any]) -> None:
        """End the epoch and print its record."""
        self.close()
        if not self._quiet:
            trained = "no micro-batch has reached the loss yet"
            if record["train_loss"] is not None:
                trained = f"loss {record['train_loss']:.3f}"
                if record["train_accuracy"] is not None:
                    trained += f", train {record['train_accuracy']:.1%}"
            bits = f", {record['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in record else ""
            print(
                f"{self._method} epoch {record['epoch']}/{self._epochs}: {trained}, "
                f"test {record['test_accuracy']:.1%} (loss {record['test_loss']:.3f}{bits}), "
                f"{record['samples_per_second']:.0f} samples/s",
                file=sys.stderr,
            )

    def write(self, text: str) -> None:
        """Print a text without disturbing the bar."""
        if not self._quiet:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
