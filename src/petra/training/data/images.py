"""The one form every data set of images takes: pixels and labels in memory, and how to normalise and augment them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra.training.data.pixels import ImageSplit
from petra.training.data.protocol import SplitName


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images in memory, uint8 (or float in [0, 1]), NCHW, with int64 labels."""

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    num_classes: int
    mean: tuple[float, ...]  # per channel, of pixel values scaled to [0, 1]
    std: tuple[float, ...]
    crop_padding: int  # random crop after this much zero padding; 0 = no crop
    flip: bool  # random horizontal flip
    class_names: tuple[str, ...] = ()  # empty when the source does not tell

    def __post_init__(self) -> None:
        self._check_split("train", self.train_images, self.train_labels)
        self._check_split("test", self.test_images, self.test_labels)
        shape, other = tuple(self.train_images.shape[1:]), tuple(self.test_images.shape[1:])
        if shape != other:
            raise ValueError(f"{self.name}: train images are {shape} but test images {other}: make them equal")
        finite = all(map(math.isfinite, (*self.mean, *self.std)))
        if not (len(self.mean) == len(self.std) == shape[0] and finite and min(self.std) > 0):
            raise ValueError(
                f"{self.name}: mean {self.mean} and std {self.std} must hold one number for each of the "
                f"{shape[0]} channels, std above 0: compute them from the training images"
            )
        if self.crop_padding < 0:
            raise ValueError(f"{self.name}: crop_padding is {self.crop_padding}: give 0 or more")
        if self.class_names and len(self.class_names) != self.num_classes:
            raise ValueError(
                f"{self.name}: {len(self.class_names)} class names for {self.num_classes} classes: "
                "give one name a class"
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
                f"for {len(images)} images: give one int64 label an image"
            )
        if images.numel() == 0:
            raise ValueError(f"{where} is empty (shape {tuple(images.shape)}): give at least one image")
        if images.is_floating_point() and not bool(torch.isfinite(images).all()):
            raise ValueError(f"{where}: images hold NaN or infinity: clean them first")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self.num_classes:
            raise ValueError(
                f"{where}: label {low if low < 0 else high} is outside 0..{self.num_classes - 1}: "
                "use a labelled split, or correct the number of classes"
            )


def assemble(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    num_classes: int,
    crop_padding: int,
    flip: bool,
    class_names: tuple[str, ...] = (),
) -> ImageData:
    """ImageData of (images, labels) pairs, uint8, with mean and std taken from the training images."""
    mean, std = channel_statistics(train[0])
    return ImageData(name, *train, *test, num_classes, mean, std, crop_padding, flip, class_names)


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images scaled to [0, 1]; a constant one has std 1.

    Counted from histograms: exact, and without a float copy of the data set.
    """
    value = torch.arange(256, dtype=torch.float64, device="cpu") / 255
    means, stds = [], []
    for channel in images.unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = (share * value).sum()
        std = (share * (value - mean) ** 2).sum().sqrt()
        means.append(float(mean))
        stds.append(float(std) if std > 1e-6 else 1.0)
    return tuple(means), tuple(stds)
