"""Decodes CIFAR-10 once for all trainings: sixty thousand PNGs take a process ten seconds, its binary form none."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from petra.training.data import load
from petra.training.data.images import ImageData

NAME = "cifar-10-batches-bin"


def decoded(source: str, out: Path) -> str:
    """What to give as --data: a folder in ``out`` with the images of ``source``, or ``source`` if it is no parquet."""
    if not list(Path(source).glob("**/*.parquet")):
        return source
    folder = out / NAME
    if not folder.exists():
        data = load(source)
        if not isinstance(data, ImageData) or tuple(data.train_images.shape[1:]) != (3, 32, 32):
            raise ValueError(f"{source} holds no images of 3×32×32: give the folder of CIFAR-10")
        if data.num_classes != 10 or len(data.train_images) % 5:
            raise ValueError(f"{source} has {data.num_classes} classes: give the folder of CIFAR-10")
        write(data, folder)
    return str(folder)


def write(data: ImageData, folder: Path) -> None:
    """As the authors of CIFAR-10 publish it: a byte of label and 3,072 of pixels for each image, in six files."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    train = zip(data.train_images.chunk(5), data.train_labels.chunk(5), strict=True)
    for number, (images, labels) in enumerate(train, start=1):
        _records(images, labels).tofile(part / f"data_batch_{number}.bin")
    _records(data.test_images, data.test_labels).tofile(part / "test_batch.bin")
    part.rename(folder)


def _records(images: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    return torch.cat([labels.to(torch.uint8)[:, None], images.flatten(1)], dim=1).numpy()
