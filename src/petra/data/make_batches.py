"""Batches of any data set, with the augmentation and the worker processes that it needs."""

from __future__ import annotations

from typing import Any

from petra.data.batches import Batches
from petra.data.dataset import Data, SplitName
from petra.data.image_files import ImageFileData
from petra.data.image_pipeline import Augmentation, Backend
from petra.data.images import ImageData
from petra.data.memory_images import augmented_batches
from petra.data.mixing import Mixing
from petra.data.sample_batches import SampleBatches


def make_batches(
    data: Data,
    split: SplitName,
    batch_size: int,
    *,
    augment: Augmentation | None = None,
    backend: Backend = "pillow",
    mixup: float = 0.0,
    cutmix: float = 0.0,
    workers: int = 0,
    inputs: bool = True,
    **common: Any,
) -> Batches | SampleBatches:
    """Return the batches of one split as a function of (seed, epoch, index).

    Data in memory and tokens become `Batches`. Images that are decoded, resized or changed one by one become
    `SampleBatches`.

    Args:
        data: The data set.
        split: `"train"` or `"test"`.
        batch_size: Samples per batch, over all shards together.
        augment: Augmentation of training images. By default, images in memory are padded, cropped and flipped, and
            others are cropped at random, resized and flipped.
        backend: Library that transforms images one by one, `"pillow"` or `"torchvision"`.
        mixup: α of mixup of training images; 0 for none.
        cutmix: α of CutMix of training images; 0 for none.
        workers: Number of worker processes that images are decoded in; 0 to decode in this process.
        inputs: Read the inputs. Otherwise images that would have to be decoded are zeros, for a rank that needs only
            the targets.
        **common: `seed`, `drop_last`, `device`, `dtype`, `shard` and `channels_last`, as in `Batches`.

    Returns:
        The batches.

    Raises:
        ValueError: If an option does not apply to the data.

    """
    mixing = None
    if (mixup or cutmix) and split == "train":
        if not isinstance(data, ImageData | ImageFileData):
            raise ValueError(
                f"--mixup is {mixup} and --cutmix is {cutmix}, but {data.name} contains {data.unit}: leave them out"
            )
        mixing = Mixing(data.num_classes, mixup, cutmix)
    if augment is not None and not isinstance(data, ImageData | ImageFileData):
        raise ValueError(f"--augment is {augment}, but {data.name} contains {data.unit}: leave it out")
    if isinstance(data, ImageFileData):
        common |= {"augment": augment, "backend": backend, "workers": workers, "inputs": inputs}
        return data.batches(split, batch_size, mixing=mixing, **common)
    if isinstance(data, ImageData) and augment == "randaugment" and split == "train":
        return augmented_batches(data, batch_size, mixing=mixing, workers=workers, **common)
    # Without augmentation, nothing of a training split is random but its order.
    crop = None if augment is None or split == "test" else augment != "none"
    return Batches(data, split, batch_size, augment=crop, mixing=mixing, **common)
