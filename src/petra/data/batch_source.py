"""The interface of sources of batches, which training loops read from.

A training loop calls `epoch` and the functions of this file, and nothing else:

```text
for index, (x, y) in enumerate(source.epoch(epoch, start), start):
    trainer.step(x, y, batch_weight(source, index))
    samples += batch_samples(source, index, x)
```

There are two kinds of sources. A **function of seed, epoch and index**, such as `Batches`, gives the same batch for
the same numbers, so it needs no state: resume with `epoch(epoch, start)`. A **resumable source** also has `state_dict`
and `load_state_dict`, such as a stream that cannot jump to a position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class BatchSource(Protocol):
    """A source of batches.

    It may also have:

    - `__len__()`: number of batches in an epoch. A stream of unknown length has none; its epoch ends when the iterator
      ends. Use `batch_count`.
    - `size(index)`: number of samples in a batch, over all replicas together. Use `batch_samples`.
    - `weight(index)`: weight of this replica's part of a batch in a mean over all replicas. Use `batch_weight`.
    - `close()`: end its worker processes. Use `close_batches`.
    - `state_dict()` and `load_state_dict(state)`, see `ResumableBatchSource`.
    """

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Any]]:
        """Iterate over the batches of an epoch.

        Args:
            epoch: Index of the epoch.
            start: Index of the first batch.

        Returns:
            An iterator over batches `start`, `start + 1`, … as (inputs, targets).

        """


@runtime_checkable
class ResumableBatchSource(BatchSource, Protocol):
    """A source of batches with a position of its own.

    Call `state_dict` between two batches, and store it with the epoch and the number of batches of this epoch so far.
    To resume, call `load_state_dict` and then `epoch` with these two numbers.
    """

    def state_dict(self) -> dict[str, Any]:
        """Describe the position after the last batch that an iterator has returned.

        Batches that have been read ahead do not count.

        Returns:
            Plain values that `torch.save` and `torch.load(weights_only=True)` can handle.

        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next call of `epoch` continue at a position.

        Args:
            state: What `state_dict` returned. The next call is `epoch(epoch, start)`, with the number of batches that
                the epoch had returned as `start`. If that epoch had ended, it is `epoch(epoch + 1, 0)`.

        """


def batch_count(source: BatchSource) -> int | None:
    """Return the number of batches in an epoch.

    Args:
        source: The source.

    Returns:
        The number, or None if it is unknown.

    """
    if not isinstance(source, Sized):
        return None
    try:
        return len(source)
    except TypeError:  # an adapter of a loader whose length is unknown
        return None


def batch_samples(source: BatchSource, index: int, inputs: Any) -> int:
    """Return the number of samples in a batch, over all replicas together.

    Args:
        source: The source.
        index: Index of the batch in the epoch.
        inputs: The inputs of the batch, which are counted if the source does not know.

    Returns:
        The number of samples.

    """
    size = getattr(source, "size", None)
    if callable(size):
        return int(size(index))
    while not isinstance(inputs, Tensor):
        inputs = next(iter(inputs.values() if isinstance(inputs, dict) else inputs))
    return len(inputs)


def batch_weight(source: BatchSource, index: int) -> float:
    """Return the weight of this replica's part of a batch in a mean over all replicas.

    Args:
        source: The source.
        index: Index of the batch in the epoch.

    Returns:
        1 if the source has no weights, or if all parts have the same number of samples.

    """
    weight = getattr(source, "weight", None)
    return float(weight(index)) if callable(weight) else 1.0


def close_batches(source: BatchSource) -> None:
    """End the worker processes of a source, if it has any.

    Args:
        source: The source; another epoch starts its processes again.

    """
    close = getattr(source, "close", None)
    if callable(close):
        close()
