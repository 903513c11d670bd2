"""One split of images on a device, where batches are gathered, augmented and normalised."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from petra.data.dataset import keyed_generator
from petra.data.device_batches import Normalise


class ImageSplit:
    """Images and labels on a device. Without `crop_padding` and `flip`, nothing about them is random."""

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
        self._images, self._labels, self.device = images.to(device), labels.to(device), device
        self._padding, self._flip = crop_padding, flip
        self._normalise = Normalise(mean, std, device, dtype, 255.0 if images.dtype == torch.uint8 else 1.0)

    def __len__(self) -> int:
        return len(self._images)

    def draw(self, count: int, seed: int, epoch: int, batch: int) -> Tensor | None:
        if not (self._padding or self._flip):
            return None
        return draw_augmentation(count, self._padding, self._flip, keyed_generator(seed, "augment", epoch, batch))

    def take(self, index: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
        images = self._images.index_select(0, index)
        if drawn is not None:
            images = crop_and_flip(images, drawn, self._padding)
        return self._normalise(images), self._labels.index_select(0, index)


def draw_augmentation(count: int, padding: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Draw a crop and a flip per image on the CPU: int64 of shape (3, count) with rows top, left, mirrored."""
    corner = torch.randint(0, 2 * padding + 1, (2, count), generator=generator, device="cpu")
    mirrored = torch.randint(0, 2 if flip else 1, (1, count), generator=generator, device="cpu")
    return torch.cat((corner, mirrored))


def crop_and_flip(images: Tensor, augmentation: Tensor, padding: int) -> Tensor:
    """Pad NCHW images with zeros, crop each at its own (top, left), and mirror those that are marked."""
    n, c, h, w = images.shape
    padded = F.pad(images, (padding, padding, padding, padding))
    top, left, mirrored = augmentation.view(3, n, 1, 1)
    y = torch.arange(h, device=images.device).view(h, 1)
    x = torch.arange(w, device=images.device)
    rows = top + y
    columns = left + torch.where(mirrored.bool(), w - 1 - x, x)
    pixels = rows * padded.shape[3] + columns  # (n, h, w): positions in a flattened padded image
    gathered = padded.flatten(2).gather(2, pixels.view(n, 1, h * w).expand(n, c, h * w))
    return gathered.view(n, c, h, w)
