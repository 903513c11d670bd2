"""Finds a data set by the name or the path a user writes."""

import os
from pathlib import Path

from petra.training.data.builtin import digits, synthetic
from petra.training.data.cifar import read_cifar
from petra.training.data.folder import read_folder
from petra.training.data.images import ImageData
from petra.training.data.parquet import read_parquet

_FOLDERS = (
    (read_cifar, "CIFAR-10 or CIFAR-100 as published, Python or binary version"),
    (read_parquet, "Hugging Face parquet: train*.parquet and test*.parquet, here or in data/"),
    (read_folder, "image files: train/<class>/*.png and test/<class>/*.png (or jpg, bmp, webp)"),
)


def load(spec: str, *, seed: int = 0) -> ImageData:
    """The data set that `spec` names (see `describe`); `seed` matters to synthetic data only."""
    if spec == "digits":
        return digits()
    if spec.partition(":")[0] == "synthetic":
        return synthetic(spec, seed)
    folder = os.path.expanduser(spec)
    if not os.path.exists(folder):
        raise FileNotFoundError(f"no data set or folder {spec!r}: give digits, synthetic or an existing folder")
    if not os.path.isdir(folder):
        raise ValueError(f"{spec!r} is a file: give the folder that holds it")
    for read, _ in _FOLDERS:
        if (data := read(Path(folder))) is not None:
            return data
    known = "; ".join(line for _, line in _FOLDERS)
    raise ValueError(f"{spec!r} holds no data set that is understood: give a folder of {known}")


def describe() -> list[tuple[str, str]]:
    """Each spec that `load` understands with one line about it, for command-line help."""
    return [
        ("digits", "1797 handwritten digits of 8x8 pixels, shipped with scikit-learn"),
        ("synthetic[:CxHxW:classes[:train_samples]]", "random images and labels; 3x32x32:10:1024 by default"),
        *(("FOLDER", line) for _, line in _FOLDERS),
    ]
