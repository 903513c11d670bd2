"""Decodes CIFAR-10 once for all trainings: 60,000 PNGs take each process ten seconds, the binary format no time."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from petra.data import load_data
from petra.data.images import ImageData

NAME = "cifar-10-batches-bin"


def decoded(source: str, out: Path) -> str:
    """Return the value for --data: a folder in `out` with the decoded images, or `source` if it is not parquet."""
    if not list(Path(source).glob("**/*.parquet")):
        return source
    folder = out / NAME
    if not folder.exists():
        data = load_data(source)
        if not isinstance(data, ImageData) or tuple(data.train_images.shape[1:]) != (3, 32, 32):
            raise ValueError(f"{source} has no images of 3×32×32: give the folder of CIFAR-10")
        if data.num_classes != 10 or len(data.train_images) % 5:
            raise ValueError(f"{source} has {data.num_classes} classes: give the folder of CIFAR-10")
        write(data, folder)
    return str(folder)


def write(data: ImageData, folder: Path) -> None:
    """Write CIFAR-10's original binary format: one byte of label and 3,072 of pixels per image, in six files."""
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
