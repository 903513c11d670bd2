"""Transforms of single images, with Pillow.

A transform is a function from an image to an image. Random ones draw from PyTorch's default generator, as those of
`torchvision.transforms.v2` do, so the two can be exchanged and combined. `SampleBatches` seeds that generator for every
sample. With the same seed and a Pillow image, each transform here and its namesake in torchvision return the same
pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from PIL.Image import Image

Transform = Callable[[Any], Any]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of the channels of ImageNet, of pixel values scaled to [0, 1]."""
_ATTEMPTS = 10


class Compose:
    """Applies transforms one after the other.

    Args:
        *transforms: The transforms.

    """

    def __init__(self, *transforms: Transform) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"


class RandomResizedCrop:
    """Crops a random rectangle and resizes it to a square.

    If no rectangle fits in ten attempts, it is the largest one in the centre with an allowed aspect ratio.

    Args:
        size: Side of the square in pixels.
        scale: Smallest and largest area of the rectangle, as a share of the area of the image.
        ratio: Smallest and largest width divided by height.

    """

    def __init__(
        self, size: int, scale: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3)
    ) -> None:
        self.size, self.scale, self.ratio = size, scale, ratio
        self._log_ratio = torch.tensor(ratio, device="cpu").log()

    def __call__(self, image: Image) -> Image:
        left, top, width, height = self.draw(image.width, image.height)
        return _resize(image.crop((left, top, left + width, top + height)), self.size, self.size)

    def draw(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Draw a rectangle.

        Args:
            width: Width of the image.
            height: Height of the image.

        Returns:
            Left, top, width and height.

        """
        low, high = self._log_ratio.tolist()
        for _ in range(_ATTEMPTS):
            area = width * height * torch.empty(1).uniform_(*self.scale).item()
            ratio = torch.empty(1).uniform_(low, high).exp().item()
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top, left = _randint(height - h + 1), _randint(width - w + 1)
                return left, top, w, h
        w, h = width, height
        if width / height < min(self.ratio):
            h = round(width / min(self.ratio))
        elif width / height > max(self.ratio):
            w = round(height * max(self.ratio))
        return (width - w) // 2, (height - h) // 2, w, h

    def __repr__(self) -> str:
        return f"RandomResizedCrop({self.size}, scale={self.scale}, ratio={self.ratio})"


class RandomCrop:
    """Pads with zeros and crops a random square, the augmentation of CIFAR.

    Args:
        size: Side of the square in pixels.
        padding: Pixels that are added on each side.

    """

    def __init__(self, size: int, padding: int = 0) -> None:
        self.size, self.padding = size, padding

    def __call__(self, image: Image) -> Image:
        width, height = image.width + 2 * self.padding, image.height + 2 * self.padding
        if self.size > min(width, height):
            raise ValueError(
                f"a crop of {self.size} pixels does not fit into an image of {image.width}x{image.height} with "
                f"{self.padding} pixels of padding: give a smaller size, or resize the images first"
            )
        top = _randint(height - self.size + 1) - self.padding if height > self.size else -self.padding
        left = _randint(width - self.size + 1) - self.padding if width > self.size else -self.padding
        return image.crop((left, top, left + self.size, top + self.size))  # Pillow fills with zeros outside

    def __repr__(self) -> str:
        return f"RandomCrop({self.size}, padding={self.padding})"


class RandomHorizontalFlip:
    """Mirrors half of the images.

    Args:
        p: Probability that an image is mirrored.

    """

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, image: Image) -> Image:
        from PIL.Image import Transpose

        return image.transpose(Transpose.FLIP_LEFT_RIGHT) if torch.rand(1).item() < self.p else image

    def __repr__(self) -> str:
        return f"RandomHorizontalFlip({self.p})"


class Resize:
    """Resizes an image so that its shorter side has a given length.

    Args:
        size: Length of the shorter side in pixels.

    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Image) -> Image:
        short, long = sorted((image.width, image.height))
        other = int(self.size * long / short)
        if image.width <= image.height:
            return _resize(image, self.size, other)
        return _resize(image, other, self.size)

    def __repr__(self) -> str:
        return f"Resize({self.size})"


class CenterCrop:
    """Crops a square from the centre. Smaller images are padded with zeros.

    Args:
        size: Side of the square in pixels.

    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Image) -> Image:
        left, top = (self._start(length) for length in (image.width, image.height))
        return image.crop((left, top, left + self.size, top + self.size))

    def _start(self, length: int) -> int:
        return round((length - self.size) / 2) if length >= self.size else -((self.size - length) // 2)

    def __repr__(self) -> str:
        return f"CenterCrop({self.size})"


def _resize(image: Image, width: int, height: int) -> Image:
    from PIL.Image import Resampling

    return image if image.size == (width, height) else image.resize((width, height), Resampling.BILINEAR)


def _randint(bound: int) -> int:
    return int(torch.randint(0, bound, (1,)))


def as_uint8(images: Sequence[Any]) -> torch.Tensor:
    """Stack Pillow images or CHW tensors of one size to NCHW.

    Pixels of Pillow images stay in their order, so the result is in the channels-last memory format.

    Args:
        images: The images.

    Returns:
        The images in one tensor.

    Raises:
        ValueError: If their sizes differ.

    """
    import numpy as np

    first = images[0]
    shapes = {tuple(x.shape) if isinstance(x, torch.Tensor) else (*x.size, x.mode) for x in images}
    if len(shapes) > 1:
        raise ValueError(f"the images of a batch are {sorted(map(str, shapes))}: add a transform that makes them equal")
    if isinstance(first, torch.Tensor):
        return torch.stack(list(images))
    channels = len(first.getbands())
    pixels = np.empty((len(images), first.height, first.width, channels), np.uint8)
    for row, image in zip(pixels, images, strict=True):
        row[:] = np.asarray(image).reshape(row.shape)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)
