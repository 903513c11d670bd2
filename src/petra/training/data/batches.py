"""Batches of one split of a data set, gathered, augmented and normalised on the device."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from petra.training.data.augment import crop_and_flip, draw_moves
from petra.training.data.images import ImageData
from petra.training.data.seeds import generator


class Batches:
    """Batches of one split as a pure function of (seed, epoch, index).

    Any position can be resumed exactly, for there is no state. The split is moved to `device` once; random
    numbers are drawn on the CPU, so every device sees the same batches. The training split is shuffled each
    epoch and, unless `augment` is False, cropped and flipped; the test split comes in order and untouched.
    With `share` (r, R), every batch is the r-th of R parts of the one that there would be without. A part of a
    training batch is never empty: where there are fewer samples than parts, one stands in, with `weight` 0.
    """

    def __init__(
        self,
        data: ImageData,
        split: Literal["train", "test"],
        batch_size: int,
        *,
        seed: int = 0,
        augment: bool | None = None,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}: give 'train' or 'test'")
        if split == "test" and augment:
            raise ValueError("augment is True for the test split: leave it out, or take the train split")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: give 1 or more")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}: give a floating-point type such as torch.float32")
        images = data.train_images if split == "train" else data.test_images
        labels = data.train_labels if split == "train" else data.test_labels
        if drop_last and batch_size > len(images):
            raise ValueError(
                f"batch_size is {batch_size} but the {split} split has {len(images)} images, so drop_last "
                "leaves no batch: give a smaller batch_size"
            )
        if split == "train" and batch_size < share[1]:
            raise ValueError(f"batch_size is {batch_size} for {share[1]} replicas: give each a sample at least")
        self.batch_size = batch_size
        self._share = share
        self.seed = seed
        self.device = torch.device(device)
        self.dtype = dtype
        self._shuffle = split == "train"
        self._drop_last = drop_last
        self._images = images.to(self.device)
        self._labels = labels.to(self.device)
        augment = split == "train" if augment is None else augment
        self._padding = data.crop_padding if augment else 0
        self._flip = data.flip and augment
        # (x / top - mean) / std as x * scale + shift; half precision only at the very end.
        self._compute = torch.float64 if dtype == torch.float64 else torch.float32
        top = 255.0 if images.dtype == torch.uint8 else 1.0
        self._scale = self._per_channel([1 / (top * std) for std in data.std])
        self._shift = self._per_channel([-mean / std for mean, std in zip(data.mean, data.std, strict=True)])

    @property
    def samples(self) -> int:
        """Number of samples in the split."""
        return len(self._images)

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
        """Batches start, start + 1, … of that epoch, as (images, labels)."""
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}: give 0 or more")
        if not 0 <= start <= len(self):
            raise ValueError(f"start is {start}: give 0 to {len(self)}, the number of batches in an epoch")
        return self._iterate(epoch, start)

    def _iterate(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = self._order(epoch)
        for i in range(start, len(self)):
            index = self._part(order[i * self.batch_size : (i + 1) * self.batch_size])
            if len(index) == 0:
                if not self._shuffle:
                    continue
                index = order[i * self.batch_size : i * self.batch_size + 1]
            images = self._images.index_select(0, index)
            if self._padding or self._flip:
                random = generator(self.seed, "augment", epoch, i)
                moves = self._part(draw_moves(self.size(i), self._padding, self._flip, random), dim=1)
                if moves.shape[1] == 0:
                    moves = torch.zeros(3, 1, dtype=torch.int64)
                moves = self._send(moves)
                images = crop_and_flip(images, moves, self._padding)
            images = images.to(self._compute).mul_(self._scale).add_(self._shift).to(self.dtype)
            yield images, self._labels.index_select(0, index)

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

    def _per_channel(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=self._compute, device=self.device).view(-1, 1, 1)
