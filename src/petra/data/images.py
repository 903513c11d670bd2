"""Image data sets: pixels and labels in memory, and the settings of normalisation and augmentation."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra.data.dataset import SplitName
from petra.data.image_split import ImageSplit


@dataclass(frozen=True, eq=False)
class ImageData:
    """Labelled images in memory.

    Raises:
        ValueError: If the fields do not fit together.

    """

    name: str
    """The name that messages use."""
    train_images: Tensor
    """Training images, NCHW, uint8 or floating-point in [0, 1]."""
    train_labels: Tensor
    """One int64 label per training image."""
    test_images: Tensor
    """Test images, of the same shape as training images."""
    test_labels: Tensor
    """One int64 label per test image."""
    num_classes: int
    """Number of classes. Labels are 0 to `num_classes - 1`."""
    mean: tuple[float, ...]
    """Mean of each channel, of pixel values scaled to [0, 1]."""
    std: tuple[float, ...]
    """Standard deviation of each channel, of pixel values scaled to [0, 1]."""
    crop_padding: int
    """Augmented images are padded with this many zeros on each side and cropped randomly; 0 for no crops."""
    flip: bool
    """Augmented images are randomly mirrored."""
    class_names: tuple[str, ...] = ()
    """Name of each class; empty if the source has no names."""

    def __post_init__(self) -> None:
        self._check_split("train", self.train_images, self.train_labels)
        self._check_split("test", self.test_images, self.test_labels)
        shape, other = tuple(self.train_images.shape[1:]), tuple(self.test_images.shape[1:])
        if shape != other:
            raise ValueError(f"{self.name}: train images are {shape}, but test images {other}: make them equal")
        finite = all(map(math.isfinite, (*self.mean, *self.std)))
        if not (len(self.mean) == len(self.std) == shape[0] and finite and min(self.std) > 0):
            raise ValueError(
                f"{self.name}: mean {self.mean} and std {self.std} must have one number for each of the "
                f"{shape[0]} channels, std above 0: compute them from the training images"
            )
        if self.crop_padding < 0:
            raise ValueError(f"{self.name}: crop_padding is {self.crop_padding}: give 0 or more")
        if self.class_names and len(self.class_names) != self.num_classes:
            raise ValueError(
                f"{self.name}: {len(self.class_names)} class names for {self.num_classes} classes: "
                "give one name per class"
            )

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        _, c, h, w = self.train_images.shape
        return c, h, w

    @property
    def unit(self) -> str:
        return "images"

    @property
    def arguments(self) -> dict[str, Any]:
        channels, height, width = self.input_shape
        size = height if height == width else (height, width)
        return {"num_classes": self.num_classes, "in_channels": channels, "image_size": size}

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return ()

    def split(self, name: SplitName, *, augment: bool, device: torch.device, dtype: torch.dtype) -> ImageSplit:
        """Move one split to a device.

        Args:
            name: `"train"` or `"test"`.
            augment: Randomly crop and flip images, or shift windows of text.
            device: Device of the split.
            dtype: Floating-point type of images. Tokens are always int64.

        Returns:
            The split.
        """
        train = name == "train"
        return ImageSplit(
            self.train_images if train else self.test_images,
            self.train_labels if train else self.test_labels,
            mean=self.mean,
            std=self.std,
            crop_padding=self.crop_padding if augment else 0,
            flip=self.flip and augment,
            device=device,
            dtype=dtype,
        )

    def _check_split(self, split: str, images: Tensor, labels: Tensor) -> None:
        where = f"{self.name}: {split} split"
        if images.ndim != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
            raise ValueError(
                f"{where}: images are {images.dtype} of shape {tuple(images.shape)}: give uint8 or float, NCHW"
            )
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"{where}: labels are {labels.dtype} of shape {tuple(labels.shape)} "
                f"for {len(images)} images: give one int64 label per image"
            )
        if images.numel() == 0:
            raise ValueError(f"{where} is empty (shape {tuple(images.shape)}): give at least one image")
        if images.is_floating_point() and not bool(torch.isfinite(images).all()):
            raise ValueError(f"{where}: images contain NaN or infinity: clean them first")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self.num_classes:
            raise ValueError(
                f"{where}: label {low if low < 0 else high} is outside 0..{self.num_classes - 1}: "
                "use a labelled split, or correct the number of classes"
            )


def build_image_data(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    num_classes: int,
    crop_padding: int,
    flip: bool,
    class_names: tuple[str, ...] = (),
) -> ImageData:
    """Make `ImageData` from (images, labels) pairs of uint8 images; mean and std are those of the training images."""
    mean, std = channel_statistics(train[0])
    return ImageData(name, *train, *test, num_classes, mean, std, crop_padding, flip, class_names)


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images scaled to [0, 1]; 1 instead of a std of 0.

    They are computed from histograms: exact, and without a floating-point copy of the data set.
    """
    value = torch.arange(256, dtype=torch.float64, device="cpu") / 255
    means, stds = [], []
    for channel in images.unbind(1):
        frequency = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = (frequency * value).sum()
        std = (frequency * (value - mean) ** 2).sum().sqrt()
        means.append(float(mean))
        stds.append(float(std) if std > 1e-6 else 1.0)
    return tuple(means), tuple(stds)
