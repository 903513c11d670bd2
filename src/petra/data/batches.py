"""Batches of one split of a data set, made on the device."""

from collections.abc import Iterator

import torch
from torch import Tensor

from petra.data.batch_plan import BatchPlan, part_bounds, read_bounds
from petra.data.dataset import Data, SplitName
from petra.data.mixing import Mixing

_BATCHES_PER_COPY = 64
"""Batches whose random numbers are copied to the device together; one copy per batch takes longer than the draws."""


class Batches:
    """Batches of one split as a pure function of (seed, epoch, index).

    There is no state, so iteration can resume at any batch with the same results. The split is moved to the device
    once, except for large token files. Random numbers are drawn on the CPU, so every device gets the same batches. The
    training split is shuffled in each epoch; the test split keeps its order and is never augmented.

    Args:
        data: The data set.
        split: `"train"` or `"test"`.
        batch_size: Samples per batch, over all shards together.
        seed: Seed of shuffling and augmentation.
        augment: Randomly crop and flip images, or shift windows of text. By default, the training split is augmented.
        drop_last: Omit the last batch of an epoch if it has fewer than `batch_size` samples.
        device: Device of the batches.
        dtype: Floating-point type of images. Tokens are always int64.
        shard: `(r, R)` to get the r-th of R parts of every batch. A part of a training batch is never empty: if the
            batch has fewer than R samples, the remaining parts are a placeholder sample with `weight` 0.
        channels_last: Store images in PyTorch's channels-last memory format.
        mixing: Mix the images of each training batch; targets are then class probabilities.

    Raises:
        ValueError: If an argument is invalid, or if `drop_last` leaves no batch.

    """

    def __init__(
        self,
        data: Data,
        split: SplitName,
        batch_size: int,
        *,
        seed: int = 0,
        augment: bool | None = None,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        shard: tuple[int, int] = (0, 1),
        channels_last: bool = False,
        mixing: Mixing | None = None,
    ) -> None:
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}: give 'train' or 'test'")
        if split == "test" and augment:
            raise ValueError("augment is True for the test split: leave it out, or use the train split")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: give 1 or more")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}: give a floating-point type such as torch.float32")
        if split == "train" and batch_size < shard[1]:
            raise ValueError(
                f"batch_size is {batch_size} for {shard[1]} replicas: give at least one sample per replica"
            )
        if mixing is not None and "in_channels" not in data.arguments:
            raise ValueError(f"mixing is given, but {data.name} contains {data.unit}, not images: leave it out")
        self.batch_size = batch_size
        self.seed = seed
        self.device = torch.device(device)
        self.dtype = dtype
        self._channels_last = channels_last
        self._mixing = mixing if split == "train" else None
        augment = split == "train" if augment is None else augment
        self._split = data.split(split, augment=augment, device=self.device, dtype=dtype)
        self._plan = BatchPlan(len(self._split), batch_size, drop_last, split == "train", seed, shard)
        if drop_last and batch_size > self.samples:
            raise ValueError(
                f"batch_size is {batch_size}, but the {split} split has {self.samples} {data.unit}, so drop_last "
                "leaves no batch: give a smaller batch_size"
            )

    @property
    def samples(self) -> int:
        """Number of samples in the split."""
        return len(self._split)

    def __len__(self) -> int:
        return len(self._plan)

    def size(self, index: int) -> int:
        """Return the number of samples in a batch, over all shards together.

        Args:
            index: Index of the batch in the epoch.

        Returns:
            `batch_size`, or less for the last batch.

        """
        return self._plan.size(index)

    def weight(self, index: int) -> float:
        """Return the weight of this shard of a batch in a mean over all shards.

        Args:
            index: Index of the batch in the epoch.

        Returns:
            1 if all shards have the same number of samples, 0 for a placeholder sample.

        """
        return self._plan.weight(index)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the batches of an epoch.

        Args:
            epoch: Index of the epoch.
            start: Index of the first batch.

        Returns:
            An iterator over batches `start`, `start + 1`, … as (inputs, targets).

        Raises:
            ValueError: If `epoch` or `start` is out of range.

        """
        self._plan.check_start(epoch, start)
        return self._iterate(epoch, start)

    def _iterate(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = self._order(epoch)
        for i, drawn in enumerate(self._drawn(epoch, start), start):
            low, high = self._part(i)
            if low == high:
                continue
            first = i * self.batch_size
            inputs, targets = self._split.take(order[first + low : first + high], drawn)
            if self._mixing is not None:
                key = self.seed, epoch, i
                inputs, targets = self._mixing.part(inputs, targets, self.size(i), self._plan.shard, *key)
            if self._channels_last and inputs.ndim == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            yield inputs, targets

    def _drawn(self, epoch: int, start: int) -> Iterator[Tensor | None]:
        """The random numbers of each batch: drawn batch by batch, copied to the device many at a time."""
        for first in range(start, len(self), _BATCHES_PER_COPY):
            chunk = [self._draw(epoch, i) for i in range(first, min(first + _BATCHES_PER_COPY, len(self)))]
            drawn = [numbers for numbers in chunk if numbers is not None]
            if not drawn:
                yield from chunk
            else:
                yield from torch.split(self._send(torch.cat(drawn, 1)), [numbers.shape[1] for numbers in drawn], 1)

    def _draw(self, epoch: int, i: int) -> Tensor | None:
        drawn = self._split.draw(self.size(i), self.seed, epoch, i)
        if drawn is None:
            return None
        low, high = part_bounds(self.size(i), self._plan.shard)
        if low == high:  # a shard without samples gets the numbers of the placeholder sample
            return drawn.new_zeros(len(drawn), 1)
        low, high = self._part(i)
        return drawn[:, low:high]

    def _part(self, i: int) -> tuple[int, int]:
        """Where the samples that this shard reads start and end in the batch."""
        return read_bounds(self.size(i), self._plan.shard, self._mixing is not None, self._plan.shuffle)

    def _order(self, epoch: int) -> Tensor:
        order = self._plan.order(epoch)
        return self._send(order) if self._plan.shuffle else order.to(self._split.device)

    def _send(self, drawn: Tensor) -> Tensor:
        # From pinned memory the copy is asynchronous: drawing the next batch never waits for the GPU.
        device = self._split.device
        if device.type == "cuda":
            return drawn.pin_memory().to(device, non_blocking=True)
        return drawn.to(device)
