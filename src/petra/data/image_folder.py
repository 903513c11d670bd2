"""Reads image data sets from folders: train/<class>/*.jpg and test/<class>/*.jpg, or <class>/*.jpg."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from petra.data.hold_out import DEFAULT_TEST_FRACTION, hold_out
from petra.data.image_decoding import DifferentSizes, Source, decode
from petra.data.image_files import DEFAULT_IMAGE_SIZE, ImageFileData
from petra.data.image_samples import ImageFiles
from petra.data.images import ImageData, build_image_data

_TEST_NAMES = ("test", "val", "valid", "validation")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


@dataclass(frozen=True)
class _Files:
    """Labelled image files of a split."""

    root: Path
    names: list[str]
    labels: Tensor

    def select(self, index: Tensor) -> _Files:
        return _Files(self.root, [self.names[i] for i in index.tolist()], self.labels[index])

    def samples(self) -> ImageFiles:
        return ImageFiles(self.root, self.names, self.labels)

    def sources(self) -> list[Source]:
        return [(str(file), file) for file in (self.root / name for name in self.names)]


def read_image_folder(
    folder: Path, test_only: bool = False, image_size: int | None = None, test_fraction: float | None = None
) -> ImageData | ImageFileData | None:
    """Read the data set in train/ and test/ (or val/, valid/, validation/), or in class folders; None if it has none.

    Args:
        folder: The folder.
        test_only: Accept a folder without train/. The test images are then used for both splits.
        image_size: Leave the images in their files, and make them squares of this size when they are needed. Without
            it, images of one size are read into memory.
        test_fraction: Share of the images that is held out, if there is no test/.

    Returns:
        The data set.

    """
    found = _splits(folder, test_only, test_fraction)
    if found is None:
        return None
    classes, train, test = found
    name = folder.resolve().name
    if image_size is None:
        try:
            # Together, so that grey or RGB is decided once.
            images = decode(train.sources() + test.sources())
        except DifferentSizes:
            image_size = DEFAULT_IMAGE_SIZE
        else:
            return build_image_data(
                name,
                (images[: len(train.names)], train.labels),
                (images[len(train.names) :], test.labels),
                num_classes=len(classes),
                crop_padding=images.shape[2] // 8,
                flip=True,
                class_names=tuple(classes),
            )
    return ImageFileData(name, train.samples(), test.samples(), len(classes), image_size, class_names=tuple(classes))


def _splits(folder: Path, test_only: bool, test_fraction: float | None) -> tuple[list[str], _Files, _Files] | None:
    """Classes, training and test files."""
    train = folder / "train"
    test = next((folder / name for name in _TEST_NAMES if (folder / name).is_dir()), None)
    if not train.is_dir():
        if test is None:
            return _hold_out(folder, _image_classes(folder), test_fraction or DEFAULT_TEST_FRACTION)
        if not test_only:
            return None
        train = test
    if test is None:
        if test_fraction is None:
            names = ", ".join(_TEST_NAMES)
            raise ValueError(f"{folder} has train/ but none of {names}: add one, or hold out --test-fraction 0.1")
        return _hold_out(train, _classes(train), test_fraction)
    if test_fraction is not None:
        raise ValueError(f"--test-fraction is {test_fraction}, but {folder} has {test.name}/: leave it out")
    classes = _classes(train)
    if classes != _classes(test):
        differing = sorted(set(classes) ^ set(_classes(test)))
        raise ValueError(f"{train} and {test} differ in class folders {differing}: make them match")
    return classes, _list_images(train, classes), _list_images(test, classes)


def _hold_out(folder: Path, classes: list[str], fraction: float) -> tuple[list[str], _Files, _Files] | None:
    if not classes:
        return None
    files = _list_images(folder, classes)
    train, test = hold_out(files.names, files.labels, fraction, folder)
    return classes, files.select(train), files.select(test)


def _classes(split: Path) -> list[str]:
    return sorted(child.name for child in split.iterdir() if child.is_dir() and not child.name.startswith("."))


def _image_classes(folder: Path) -> list[str]:
    """The folders in a folder, if images are in each of them."""
    classes = _classes(folder)
    return classes if all(_has_images(folder / name) for name in classes) else []


def _has_images(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(map(_is_image, entries))


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(_SUFFIXES) and not entry.name.startswith(".")


def _list_images(split: Path, classes: list[str]) -> _Files:
    names: list[str] = []
    labels = []
    for label, name in enumerate(classes):
        with os.scandir(split / name) as entries:
            files = sorted(entry.name for entry in entries if _is_image(entry))
        if not files and split.name == "train":
            raise ValueError(f"{split / name} contains no images: put {', '.join(_SUFFIXES)} files there, or remove it")
        names += [f"{name}/{file}" for file in files]
        labels += [label] * len(files)
    if not names:
        raise ValueError(f"{split} contains no images: put {', '.join(_SUFFIXES)} files in {split}/<class>/")
    return _Files(split, names, torch.tensor(labels, dtype=torch.int64, device="cpu"))
