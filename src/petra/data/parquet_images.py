"""Reads image data sets from the parquet files of Hugging Face."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from petra.data.image_decoding import DifferentSizes, Source, decode, open_image
from petra.data.image_files import DEFAULT_IMAGE_SIZE, ImageFileData
from petra.data.image_samples import EncodedImages
from petra.data.images import ImageData, build_image_data
from petra.data.parquet_files import (
    LABEL_NAMES,
    TEXT_NAMES,
    byte_columns,
    common_class_names,
    find_parquet,
    pick_column,
    read_class_names,
    read_schema,
    read_table,
)

UNLABELLED = -1
"""The usual notation for a missing label."""
_IMAGE_NAMES = ("img", "image", "images", "picture")


@dataclass(frozen=True)
class _Rows:
    sources: list[Source]
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]


def read_parquet_images(
    folder: Path, test_only: bool = False, image_size: int | None = None
) -> ImageData | ImageFileData | None:
    """Read the data set in train*.parquet and test*.parquet (or val*, if test* has no labels); None without train*.

    Images of one size are decoded into memory. Others stay encoded in memory, and become squares of `image_size` (by
    default 224) when they are needed; so do those of another size than `image_size`, if it is given. With `test_only`,
    train* may be missing; the test images are then used for both splits.
    """
    root = find_parquet(folder)
    if root is None and test_only:
        root = find_parquet(folder, "test") or find_parquet(folder, "val")
    if root is None:
        return None
    training = sorted(root.glob("train*.parquet"))
    train = _read_all(training) if training else None
    for name in ("test", "val"):
        if paths := sorted(root.glob(f"{name}*.parquet")):
            test = _read_all(paths)
            if not len(test.labels) or (test.labels != UNLABELLED).any():
                return _assemble(folder, train or test, test, image_size)
    has = "train*.parquet" if training else "parquet files"
    raise ValueError(f"{root} has {has} but no test*.parquet or validation*.parquet with labels: add one")


def _assemble(folder: Path, train: _Rows, test: _Rows, image_size: int | None) -> ImageData | ImageFileData:
    count = len(train.sources)
    if not count or not test.sources:
        raise ValueError(f"{folder}: the {'test' if count else 'train'} parquet files are empty: give some images")
    highest = max(int(train.labels.max()), int(test.labels.max()))
    class_names = common_class_names(folder, (train.class_names, test.class_names))
    name, classes = folder.resolve().name, len(class_names) or max(highest, 0) + 1
    if image_size in (None, *_sides(train.sources[0])):
        try:
            images = decode(train.sources + test.sources)  # together, so that grey or RGB is decided once
        except DifferentSizes:
            pass
        else:
            return build_image_data(
                name,
                (images[:count], torch.from_numpy(train.labels)),
                (images[count:], torch.from_numpy(test.labels)),
                num_classes=classes,
                crop_padding=images.shape[2] // 8,
                flip=True,
                class_names=class_names,
            )
    encoded = (EncodedImages(rows.sources, torch.from_numpy(rows.labels)) for rows in (train, test))
    return ImageFileData(
        name, next(encoded), next(encoded), classes, image_size or DEFAULT_IMAGE_SIZE, class_names=class_names
    )


def _sides(source: Source) -> set[int]:
    """The side of a square image; two sides of another one never equal an image size."""
    width, height = open_image(*source).size
    return {width} if width == height else set()


def _read_all(paths: list[Path]) -> _Rows:
    parts = [_read_file(path) for path in paths]
    sources = [source for part in parts for source in part.sources]
    names = common_class_names(paths[0].parent, (part.class_names for part in parts))
    return _Rows(sources, np.concatenate([part.labels for part in parts]), names)


def _read_file(path: Path) -> _Rows:
    schema = read_schema(path)
    image, label = _image_column(path, schema), _label_column(path, schema)
    table = read_table(path, [image, label])
    encoded = [row["bytes"] if isinstance(row, dict) else row for row in table.column(image).to_pylist()]
    if None in encoded:
        raise ValueError(f"{path} row {encoded.index(None)} contains no image bytes: embed the images in the file")
    labels = table.column(label)
    if labels.null_count == len(labels):
        labels = labels.fill_null(UNLABELLED)
    elif labels.null_count:
        raise ValueError(f"{path} has {labels.null_count} empty labels: use a labelled split")
    sources: list[Source] = [(f"{path} row {i}", content) for i, content in enumerate(encoded)]
    return _Rows(sources, labels.to_numpy().astype(np.int64), read_class_names(schema, label))


def _image_column(path: Path, schema: Any) -> str:
    found = byte_columns(schema)
    if not found:
        raise ValueError(
            f"{path} has no image column among {schema.names}, nor a text column: name it "
            f"{' or '.join(_IMAGE_NAMES)} with encoded images in it, or {' or '.join(TEXT_NAMES)}"
        )
    return pick_column(path, "image", _IMAGE_NAMES, found, schema)


def _label_column(path: Path, schema: Any) -> str:
    from pyarrow import types

    kinds = {field.name: field.type for field in schema if field.name in LABEL_NAMES}
    whole = [name for name, kind in kinds.items() if types.is_integer(kind) or types.is_boolean(kind)]
    if kinds and not whole:
        name, kind = next(iter(kinds.items()))
        raise ValueError(f"{path} has a column {name} of type {kind}: give integer labels from 0")
    return pick_column(path, "label", LABEL_NAMES, whole, schema)
