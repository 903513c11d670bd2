"""Data sets that need no files: scikit-learn's digits, and random images to measure speed and memory."""

import re

import numpy as np
import torch
from torch import Tensor

from petra.data.dataset import keyed_generator
from petra.data.images import ImageData, build_image_data

_COUNT = "([1-9][0-9]*)"
_SYNTHETIC = re.compile(f"synthetic(?::{_COUNT}x{_COUNT}x{_COUNT}:{_COUNT}(?::{_COUNT})?)?")


def digits() -> ImageData:
    """1797 handwritten digits of 8×8 pixels; a fixed, stratified fifth of them is the test split."""
    from sklearn.datasets import load_digits  # imported here because it takes a second
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    train, test = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=0, stratify=labels)

    def part(index: np.ndarray) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(images[index]), torch.from_numpy(labels[index].astype(np.int64))

    return build_image_data(
        "digits",
        part(train),
        part(test),
        num_classes=10,
        crop_padding=1,
        flip=False,
        class_names=tuple("0123456789"),
    )


def synthetic(spec: str, seed: int) -> ImageData:
    """Random uint8 images with random labels; the test split is a quarter of the size of the training split."""
    match = _SYNTHETIC.fullmatch(spec)
    if match is None:
        raise ValueError(f"cannot parse {spec!r}: write synthetic:CxHxW:classes[:train_samples], all above 0")
    c, h, w, classes, samples = (int(m or d) for m, d in zip(match.groups(), (3, 32, 32, 10, 1024), strict=True))
    random = keyed_generator(seed, "synthetic")

    def part(count: int) -> tuple[Tensor, Tensor]:
        images = torch.randint(0, 256, (count, c, h, w), dtype=torch.uint8, generator=random, device="cpu")
        return images, torch.randint(0, classes, (count,), generator=random, device="cpu")

    train, test = part(samples), part(max(1, samples // 4))
    return build_image_data("synthetic", train, test, num_classes=classes, crop_padding=h // 8, flip=True)
