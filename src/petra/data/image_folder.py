"""Reads image data sets from folders: train/<class>/*.png and test/<class>/*.png."""

from pathlib import Path

import torch
from torch import Tensor

from petra.data.image_decoding import Source, decode
from petra.data.images import ImageData, build_image_data

_TEST_NAMES = ("test", "val", "valid", "validation")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


def read_image_folder(folder: Path, test_only: bool = False) -> ImageData | None:
    """Read the data set in train/ and test/ (or val/, valid/, validation/); None without train/.

    With `test_only`, train/ may be missing; the test images are then used for both splits.
    """
    train = folder / "train"
    test = next((folder / name for name in _TEST_NAMES if (folder / name).is_dir()), None)
    if not train.is_dir():
        if not test_only or test is None:
            return None
        train = test
    if test is None:
        raise ValueError(f"{folder} has train/ but none of {', '.join(_TEST_NAMES)}: add one")
    classes = _classes(train)
    if classes != _classes(test):
        differing = sorted(set(classes) ^ set(_classes(test)))
        raise ValueError(f"{train} and {test} differ in class folders {differing}: make them match")
    train_sources, train_labels = _list_images(train, classes)
    test_sources, test_labels = _list_images(test, classes)
    images = decode(train_sources + test_sources)  # together, so that grey or RGB is decided once
    return build_image_data(
        folder.resolve().name,
        (images[: len(train_sources)], train_labels),
        (images[len(train_sources) :], test_labels),
        num_classes=len(classes),
        crop_padding=images.shape[2] // 8,
        flip=True,
        class_names=tuple(classes),
    )


def _classes(split: Path) -> list[str]:
    return sorted(child.name for child in split.iterdir() if child.is_dir() and not child.name.startswith("."))


def _list_images(split: Path, classes: list[str]) -> tuple[list[Source], Tensor]:
    sources: list[Source] = []
    labels = []
    for label, name in enumerate(classes):
        visible = (file for file in (split / name).iterdir() if not file.name.startswith("."))
        files = sorted(file for file in visible if file.suffix.lower() in _SUFFIXES)
        if not files and split.name == "train":
            raise ValueError(f"{split / name} contains no images: put {', '.join(_SUFFIXES)} files there, or remove it")
        sources += [(str(file), file) for file in files]
        labels += [label] * len(files)
    if not sources:
        raise ValueError(f"{split} contains no images: put {', '.join(_SUFFIXES)} files in {split}/<class>/")
    return sources, torch.tensor(labels, dtype=torch.int64, device="cpu")
