"""Reads CIFAR-10 and CIFAR-100 as their authors publish them: Python pickles or binary records."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petra.data.images import ImageData, build_image_data
from petra.data.safe_pickle import read_pickle

_PIXELS = 3 * 32 * 32
_Arrays = tuple[NDArray[Any], NDArray[Any]]


def _read_python(path: Path, label_key: str) -> _Arrays:
    content = read_pickle(path)
    if not isinstance(content, dict):
        raise _malformed(path, "not a dictionary")

    def entry(key: str) -> NDArray[Any]:
        value = content.get(key.encode(), content.get(key))
        try:
            return np.asarray(value)
        except ValueError:
            raise _malformed(path, f"a ragged {key!r}") from None

    return entry("data"), entry(label_key)


def _read_binary(path: Path, label_bytes: int) -> _Arrays:
    content = np.frombuffer(path.read_bytes(), np.uint8)
    record = label_bytes + _PIXELS
    if content.size % record:
        raise _malformed(path, f"{content.size} bytes are not a multiple of the record size {record}")
    records = content.reshape(-1, record)
    return records[:, label_bytes:], records[:, label_bytes - 1]  # CIFAR-100: coarse label, then fine


@dataclass(frozen=True)
class _Layout:
    name: str
    subfolder: str
    train: tuple[str, ...]
    test: str
    classes: int
    read: Callable[[Path], _Arrays]


_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_BINARY_BATCHES = tuple(f"{name}.bin" for name in _BATCHES)
_LAYOUTS = (
    _Layout("cifar10", "cifar-10-batches-py", _BATCHES, "test_batch", 10, lambda p: _read_python(p, "labels")),
    _Layout("cifar10", "cifar-10-batches-bin", _BINARY_BATCHES, "test_batch.bin", 10, lambda p: _read_binary(p, 1)),
    _Layout("cifar100", "cifar-100-python", ("train",), "test", 100, lambda p: _read_python(p, "fine_labels")),
    _Layout("cifar100", "cifar-100-binary", ("train.bin",), "test.bin", 100, lambda p: _read_binary(p, 2)),
)


def read_cifar(folder: Path, test_only: bool = False) -> ImageData | None:
    """Read the data set in this folder, or in the subfolder that its archive unpacks to; None if there is none.

    With `test_only`, the training batches may be missing; the test batch is then used for both splits.
    """
    found = [
        (root, layout)
        for root in (folder, *(folder / layout.subfolder for layout in _LAYOUTS))
        for layout in _LAYOUTS
        if any((root / name).is_file() for name in (*layout.train, layout.test))
    ]
    if len({layout.name for _, layout in found}) > 1:
        raise ValueError(
            f"{folder} contains more than one data set: give one of {', '.join(str(root) for root, _ in found)}"
        )
    if not found:
        return None
    root, layout = found[0]
    if test_only and not any((root / name).is_file() for name in layout.train):
        layout = replace(layout, train=(layout.test,))
    return _read_layout(root, layout)


def _read_layout(root: Path, layout: _Layout) -> ImageData:
    for name in (*layout.train, layout.test):
        if not (root / name).is_file():
            raise FileNotFoundError(f"{root / name} is missing: unpack the {layout.name} archive again")
    return build_image_data(
        layout.name,
        _tensors([_checked(root / name, layout) for name in layout.train]),
        _tensors([_checked(root / layout.test, layout)]),
        num_classes=layout.classes,
        crop_padding=4,
        flip=True,
    )


def _checked(path: Path, layout: _Layout) -> _Arrays:
    pixels, labels = layout.read(path)
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != _PIXELS or len(pixels) == 0:
        raise _malformed(path, f"pixels are {pixels.dtype} of shape {pixels.shape}")
    if labels.dtype.kind not in "iu" or labels.shape != pixels.shape[:1]:
        raise _malformed(path, f"labels are {labels.dtype} of shape {labels.shape} for {len(pixels)} images")
    if labels.min() < 0 or labels.max() >= layout.classes:
        raise _malformed(path, f"labels span {labels.min()}..{labels.max()}, not 0..{layout.classes - 1}")
    return pixels, labels


def _tensors(parts: list[_Arrays]) -> tuple[Tensor, Tensor]:
    pixels = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([labels.astype(np.int64) for _, labels in parts])
    return torch.from_numpy(pixels), torch.from_numpy(labels)


def _malformed(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} is not a complete CIFAR file ({what}): unpack the archive again")
