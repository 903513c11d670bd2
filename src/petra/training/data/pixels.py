"""One split of images on a device: gathered, augmented and normalised there."""

from collections.abc import Sequence

import torch
from torch import Tensor

from petra.training.data.augment import crop_and_flip, draw_moves
from petra.training.data.seeds import generator


class ImageSplit:
    """Images and labels; without ``crop_padding`` and ``flip`` nothing about them is random."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        crop_padding: int,
        flip: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._images, self._labels = images.to(device), labels.to(device)
        self._padding, self._flip, self._dtype = crop_padding, flip, dtype
        # (x / top - mean) / std as x * scale + shift; half precision only at the very end.
        self._compute = torch.float64 if dtype == torch.float64 else torch.float32
        top = 255.0 if images.dtype == torch.uint8 else 1.0
        self._scale = self._per_channel([1 / (top * s) for s in std])
        self._shift = self._per_channel([-m / s for m, s in zip(mean, std, strict=True)])

    def __len__(self) -> int:
        return len(self._images)

    def draw(self, count: int, seed: int, epoch: int, batch: int) -> Tensor | None:
        if not (self._padding or self._flip):
            return None
        return draw_moves(count, self._padding, self._flip, generator(seed, "augment", epoch, batch))

    def take(self, index: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
        images = self._images.index_select(0, index)
        if drawn is not None:
            images = crop_and_flip(images, drawn, self._padding)
        images = images.to(self._compute).mul_(self._scale).add_(self._shift).to(self._dtype)
        return images, self._labels.index_select(0, index)

    def _per_channel(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=self._compute, device=self._images.device).view(-1, 1, 1)
