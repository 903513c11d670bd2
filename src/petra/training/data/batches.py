"""Batches of one split of a data set, made on the device."""

from collections.abc import Iterator

import torch
from torch import Tensor

from petra.training.data.protocol import Data, SplitName
from petra.training.data.seeds import generator

_AHEAD = 64
"""Batches whose random numbers go to the device together: a copy of its own for each takes longer than to draw them."""


class Batches:
    """Batches of one split as a pure function of (seed, epoch, index).

    Any position can be resumed exactly, for there is no state. The split is moved to `device` once; random
    numbers are drawn on the CPU, so every device sees the same batches. The training split is shuffled each
    epoch and, unless `augment` is False, images are cropped and flipped and windows of text begin elsewhere; the
    test split comes in order and untouched. `dtype` is that of images; tokens are int64.
    With `share` (r, R), every batch is the r-th of R parts of the one that there would be without. A part of a
    training batch is never empty: where there are fewer samples than parts, one stands in, with `weight` 0.
    With `channels_last`, that is how images lie in memory.
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
        share: tuple[int, int] = (0, 1),
        channels_last: bool = False,
    ) -> None:
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}: give 'train' or 'test'")
        if split == "test" and augment:
            raise ValueError("augment is True for the test split: leave it out, or take the train split")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: give 1 or more")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}: give a floating-point type such as torch.float32")
        if split == "train" and batch_size < share[1]:
            raise ValueError(f"batch_size is {batch_size} for {share[1]} replicas: give each a sample at least")
        self.batch_size = batch_size
        self._share = share
        self.seed = seed
        self.device = torch.device(device)
        self.dtype = dtype
        self._channels_last = channels_last
        self._shuffle = split == "train"
        self._drop_last = drop_last
        augment = split == "train" if augment is None else augment
        self._split = data.split(split, augment=augment, device=self.device, dtype=dtype)
        if drop_last and batch_size > self.samples:
            raise ValueError(
                f"batch_size is {batch_size} but the {split} split has {self.samples} {data.unit}, so drop_last "
                "leaves no batch: give a smaller batch_size"
            )

    @property
    def samples(self) -> int:
        """Number of samples in the split."""
        return len(self._split)

    def __len__(self) -> int:
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def size(self, index: int) -> int:
        """Samples in the whole batch of that index, all shares together."""
        return min(self.batch_size, self.samples - index * self.batch_size)

    def weight(self, index: int) -> float:
        """What this share of that batch counts for in a mean over all shares."""
        own, shares = self._share
        whole, rest = divmod(self.size(index), shares)
        return (whole + (own < rest)) * shares / self.size(index)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches start, start + 1, … of that epoch, as (inputs, targets)."""
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}: give 0 or more")
        if not 0 <= start <= len(self):
            raise ValueError(f"start is {start}: give 0 to {len(self)}, the number of batches in an epoch")
        return self._iterate(epoch, start)

    def _iterate(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = self._order(epoch)
        for i, drawn in enumerate(self._drawn(epoch, start), start):
            index = self._part(order[i * self.batch_size : (i + 1) * self.batch_size])
            if len(index) == 0:
                if not self._shuffle:
                    continue
                index = order[i * self.batch_size : i * self.batch_size + 1]
            inputs, targets = self._split.take(index, drawn)
            if self._channels_last and inputs.ndim == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            yield inputs, targets

    def _drawn(self, epoch: int, start: int) -> Iterator[Tensor | None]:
        """What is random about each batch: drawn for each by itself, and sent for many at a time."""
        for first in range(start, len(self), _AHEAD):
            some = [self._draw(epoch, i) for i in range(first, min(first + _AHEAD, len(self)))]
            found = [drawn for drawn in some if drawn is not None]
            if not found:
                yield from some
            else:
                yield from torch.split(self._send(torch.cat(found, 1)), [drawn.shape[1] for drawn in found], 1)

    def _draw(self, epoch: int, i: int) -> Tensor | None:
        drawn = self._split.draw(self.size(i), self.seed, epoch, i)
        if drawn is None:
            return None
        drawn = self._part(drawn, dim=1)
        # Where there is none for this share, there is one that stands in.
        return drawn if drawn.shape[1] else drawn.new_zeros(len(drawn), 1)

    def _part(self, whole: Tensor, dim: int = 0) -> Tensor:
        return whole.tensor_split(self._share[1], dim)[self._share[0]]

    def _order(self, epoch: int) -> Tensor:
        if not self._shuffle:
            return torch.arange(self.samples, device=self.device)
        random = generator(self.seed, "order", epoch)
        return self._send(torch.randperm(self.samples, generator=random, device="cpu"))

    def _send(self, drawn: Tensor) -> Tensor:
        # From pinned memory the copy is asynchronous: drawing the next batch never waits for the GPU.
        if self.device.type == "cuda":
            return drawn.pin_memory().to(self.device, non_blocking=True)
        return drawn.to(self.device)
