"""Images in memory that are changed one by one: resized, or augmented with RandAugment."""

from __future__ import annotations

from typing import Any

import torch

from petra.data.image_files import ImageFileData
from petra.data.image_samples import DecodedImages
from petra.data.images import ImageData
from petra.data.mixing import Mixing
from petra.data.rand_augment import RandAugment
from petra.data.sample_batches import SampleBatches
from petra.data.transforms import Compose, RandomCrop, RandomHorizontalFlip


def resizable(data: ImageData, size: int) -> ImageFileData:
    """Return images in memory as images that become squares of a size when they are needed.

    Args:
        data: The images, uint8 with 1 or 3 channels.
        size: Height and width of the images that a network gets.

    Returns:
        The same images, normalised in the same way.

    Raises:
        ValueError: If Pillow cannot represent the images.

    """
    if data.train_images.dtype != torch.uint8 or data.input_shape[0] not in (1, 3):
        raise ValueError(
            f"{data.name} has {data.input_shape[0]} channels of {data.train_images.dtype}, but images with 1 or 3 "
            "channels of torch.uint8 can be resized: leave --image-size out"
        )
    train = DecodedImages(data.train_images, data.train_labels)
    test = DecodedImages(data.test_images, data.test_labels)
    return ImageFileData(data.name, train, test, data.num_classes, size, data.mean, data.std, data.class_names)


def augmented_batches(
    data: ImageData, batch_size: int, *, mixing: Mixing | None = None, workers: int = 0, **common: Any
) -> SampleBatches:
    """Return training batches with the crops and flips of the data set, and RandAugment.

    Args:
        data: The images, uint8 with 1 or 3 channels and square.
        batch_size: Samples per batch, over all shards together.
        mixing: Mix the images of each batch.
        workers: Number of worker processes.
        **common: `seed`, `drop_last`, `device`, `dtype`, `shard` and `channels_last`, as in `Batches`.

    Returns:
        The batches.

    Raises:
        ValueError: If Pillow cannot represent the images.

    """
    channels, height, width = data.input_shape
    if data.train_images.dtype != torch.uint8 or channels not in (1, 3) or height != width:
        raise ValueError(
            f"--augment is randaugment, but {data.name} has images {channels}x{height}x{width} of "
            f"{data.train_images.dtype}: give square uint8 images with 1 or 3 channels, or --augment crop-flip"
        )
    flip = [RandomHorizontalFlip()] if data.flip else []
    return SampleBatches(
        DecodedImages(data.train_images, data.train_labels),
        batch_size,
        transform=Compose(RandomCrop(height, data.crop_padding), *flip, RandAugment()),
        normalise=(data.mean, data.std),
        mixing=mixing,
        workers=workers,
        **common,
    )
