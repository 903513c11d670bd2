"""Which samples are in which batch, and which of them belong to which replica."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from petra.data.dataset import keyed_generator


def part_bounds(size: int, shard: tuple[int, int]) -> tuple[int, int]:
    """Return where the r-th of R parts of a batch starts and ends. The first parts have one sample more."""
    index, shards = shard
    quotient, remainder = divmod(size, shards)
    low = index * quotient + min(index, remainder)
    return low, low + quotient + (index < remainder)


def pair_bounds(size: int, shard: tuple[int, int]) -> tuple[int, int]:
    """Return `part_bounds`, extended to whole pairs of samples 0 and 1, 2 and 3, …."""
    low, high = part_bounds(size, shard)
    return (low, high) if low == high else (low - low % 2, min(high + high % 2, size))


def read_bounds(size: int, shard: tuple[int, int], pairs: bool, placeholder: bool) -> tuple[int, int]:
    """Return where the samples start and end that a shard reads of a batch.

    Args:
        size: Samples in the batch.
        shard: `(r, R)` for the r-th of R parts.
        pairs: Read whole pairs, to mix them.
        placeholder: Read the first sample of the batch if the part is empty.

    Returns:
        The two positions; equal if nothing is read.

    """
    low, high = pair_bounds(size, shard) if pairs else part_bounds(size, shard)
    return (0, 1) if low == high and placeholder else (low, high)


@dataclass(frozen=True)
class BatchPlan:
    """The batches of a split as a function of seed, epoch and index."""

    samples: int
    """Number of samples in an epoch."""
    batch_size: int
    """Samples per batch, over all shards together."""
    drop_last: bool = False
    """Omit the last batch of an epoch if it has fewer than `batch_size` samples."""
    shuffle: bool = True
    """Take the samples of each epoch in another order."""
    seed: int = 0
    """Seed of that order."""
    shard: tuple[int, int] = (0, 1)
    """`(r, R)` for the r-th of R parts of every batch."""

    def __len__(self) -> int:
        full, remainder = divmod(self.samples, self.batch_size)
        return full + (remainder > 0 and not self.drop_last)

    def size(self, index: int) -> int:
        """Return the number of samples in a batch, over all shards together."""
        return min(self.batch_size, self.samples - index * self.batch_size)

    def weight(self, index: int) -> float:
        """Return the weight of this shard of a batch in a mean over all shards; 0 for a placeholder sample."""
        size, shards = self.size(index), self.shard[1]
        low, high = part_bounds(size, self.shard)
        return (high - low) * shards / size

    def order(self, epoch: int) -> Tensor:
        """Return the samples of an epoch in their order, on the CPU."""
        if not self.shuffle:
            return torch.arange(self.samples, device="cpu")
        return torch.randperm(self.samples, generator=keyed_generator(self.seed, "order", epoch), device="cpu")

    def check_start(self, epoch: int, start: int) -> None:
        """Raise ValueError if there is no such epoch or batch."""
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}: give 0 or more")
        if not 0 <= start <= len(self):
            raise ValueError(f"start is {start}: give 0 to {len(self)}, the number of batches in an epoch")
