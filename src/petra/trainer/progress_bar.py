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
        title: The name of the training, such as that of its method.
        epochs: The number of epochs; None if it is not known.
        batches: The number of micro-batches in an epoch; None if it is not known.
        quiet: Print nothing.
        steps: The number of updates, if that ends the training.
    """

    def __init__(
        self, title: str, epochs: int | None, batches: int | None, quiet: bool = False, steps: int | None = None
    ) -> None:
        self._title, self._epochs, self._batches, self._steps = title, epochs, batches, steps
        self._quiet = quiet
        self._live = not quiet and sys.stderr.isatty()
        self._bar: Any = None
        self._next = 0.0  # the time of the next reading

    def start(self, epoch: int, batch: int) -> None:
        """Start an epoch at micro-batch `batch`."""
        if self._live:
            title = f"{self._title} epoch {_of(epoch + 1, self._epochs)}"
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
        self.report(record)

    def report(self, record: dict[str, Any]) -> None:
        """Print the record of an evaluation."""
        whole = float(record["epoch"]).is_integer() and self._epochs is not None
        where = f"epoch {_of(record['epoch'], self._epochs)}" if whole else f"step {_of(record['step'], self._steps)}"
        trained = "no micro-batch has reached the loss yet"
        if record["train_loss"] is not None:
            trained = f"loss {record['train_loss']:.3f}"
            if record["train_accuracy"] is not None:
                trained += f", train {record['train_accuracy']:.1%}"
        tested = "".join(self._tested(record, kind) for kind in ("test", "ema_test"))
        self.write(f"{self._title} {where}: {trained}{tested}, {record['samples_per_second']:.0f} samples/s")

    @staticmethod
    def _tested(record: dict[str, Any], kind: str) -> str:
        if f"{kind}_loss" not in record:
            return ""
        name, loss, accuracy = kind.replace("_", " "), f"{record[f'{kind}_loss']:.3f}", record[f"{kind}_accuracy"]
        if accuracy is None:
            return f", {name} loss {loss}"
        bits = f", {record['bits_per_byte']:.3f} bits per byte" if kind == "test" and "bits_per_byte" in record else ""
        return f", {name} {accuracy:.1%} (loss {loss}{bits})"

    def write(self, text: str) -> None:
        """Print a text without disturbing the bar."""
        if not self._quiet:
            tqdm.write(text, file=sys.stderr)

    def warn(self, text: str) -> None:
        """Print a warning, also if the training is quiet."""
        tqdm.write(f"warning: {text}", file=sys.stderr)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _of(number: float, total: int | None) -> str:
    return f"{number:g}" if total is None else f"{number:g}/{total}"
