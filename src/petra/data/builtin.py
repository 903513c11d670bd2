"""Data sets that need no files: scikit-learn's digits, and random images to measure speed and memory."""

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from petra.data.dataset import keyed_generator
from petra.data.images import ImageData, build_image_data

_COUNT = "([1-9][0-9]*)"
_SYNTHETIC = re.compile(f"synthetic(?::{_COUNT}x{_COUNT}x{_COUNT}:{_COUNT}(?::{_COUNT})?)?")


def digits() -> ImageData:
    """1797 handwritten digits of 8×8 pixels; a fixed, stratified fifth of them is the test split."""
    pixels, labels = _read_digits()
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    train, test = _stratified_split(labels, tests=360)

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


def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels from the file of scikit-learn, which itself takes seconds to import."""
    found = find_spec("sklearn")
    file = Path(found.origin).parent / "datasets/data/digits.csv.gz" if found and found.origin else None
    if file is not None and file.is_file():
        rows = np.loadtxt(file, delimiter=",")
        return rows[:, :-1], rows[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    pixels: np.ndarray
    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels


def _stratified_split(labels: np.ndarray, tests: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices for training and for testing: those of scikit-learn's `train_test_split` with random_state 0."""
    random = np.random.RandomState(0)
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    trained = _shares(counts, len(labels) - tests, random)
    tested = _shares(counts - trained, tests, random)
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for number, (first, second) in enumerate(zip(trained, tested, strict=True)):
        index = np.flatnonzero(classes == number)[random.permutation(counts[number])]
        parts[0].append(index[:first])
        parts[1].append(index[first : first + second])
    train, test = (random.permutation(np.concatenate(part)) for part in parts)
    return train, test


def _shares(counts: np.ndarray, total: int, random: np.random.RandomState) -> np.ndarray:
    """Divide a total in proportion to counts; the largest remainders are rounded up, and equal ones at random."""
    exact = counts / counts.sum() * total
    shares: np.ndarray = exact.astype(int)
    left = int(total - shares.sum())
    remainders = exact - shares
    for value in np.unique(remainders)[::-1]:
        if left == 0:
            break
        (equal,) = np.where(remainders == value)
        chosen = random.choice(equal, size=min(len(equal), left), replace=False)
        shares[chosen] += 1
        left -= len(chosen)
    return shares


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
