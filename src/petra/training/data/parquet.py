"""Image data sets in Hugging Face's parquet files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from petra.training.data.decode import Source, decode
from petra.training.data.images import ImageData, assemble

_IMAGE_NAMES = ("img", "image", "images", "picture")
_LABEL_NAMES = ("label", "fine_label", "labels")


@dataclass(frozen=True)
class _Part:
    sources: list[Source]
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]


def read_parquet(folder: Path) -> ImageData | None:
    """The data set in train*.parquet and test*.parquet (or val*) here or in data/; None without the first."""
    for root in (folder, folder / "data"):
        if train := sorted(root.glob("train*.parquet")):
            test = sorted(root.glob("test*.parquet")) or sorted(root.glob("val*.parquet"))
            if not test:
                raise ValueError(f"{root} has train*.parquet but no test*.parquet or validation*.parquet: add one")
            return _assemble(folder, _read_all(train), _read_all(test))
    return None


def _assemble(folder: Path, train: _Part, test: _Part) -> ImageData:
    count = len(train.sources)
    if not count or not test.sources:
        raise ValueError(f"{folder}: the {'test' if count else 'train'} parquet files are empty: give some images")
    images = decode(train.sources + test.sources)  # together, so that grey or RGB is decided once
    highest = max(int(train.labels.max()), int(test.labels.max()))
    return assemble(
        folder.resolve().name,
        (images[:count], torch.from_numpy(train.labels)),
        (images[count:], torch.from_numpy(test.labels)),
        num_classes=len(train.class_names) or max(highest, 0) + 1,
        crop_padding=images.shape[2] // 8,
        flip=True,
        class_names=train.class_names,
    )


def _read_all(paths: list[Path]) -> _Part:
    parts = [_read_file(path) for path in paths]
    sources = [source for part in parts for source in part.sources]
    return _Part(sources, np.concatenate([part.labels for part in parts]), parts[0].class_names)


def _read_file(path: Path) -> _Part:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"reading {path} needs pyarrow: pip install 'petra[images]'") from error
    try:
        schema = parquet.read_schema(path)
        image, label = _image_column(path, schema), _label_column(path, schema)
        table = parquet.read_table(path, columns=[image, label]).combine_chunks()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is not a readable parquet file ({type(error).__name__}): download it again"
        ) from error
    encoded = [row["bytes"] if isinstance(row, dict) else row for row in table.column(image).to_pylist()]
    if None in encoded:
        raise ValueError(f"{path} row {encoded.index(None)} holds no image bytes: embed the images in the file")
    labels = table.column(label)
    if labels.null_count:
        raise ValueError(f"{path} has {labels.null_count} empty labels: use a labelled split")
    sources: list[Source] = [(f"{path} row {i}", content) for i, content in enumerate(encoded)]
    return _Part(sources, labels.to_numpy().astype(np.int64), _class_names(schema, label))


def _image_column(path: Path, schema: Any) -> str:
    from pyarrow import types

    def holds_bytes(kind: Any) -> bool:
        if types.is_struct(kind):
            return any(field.name == "bytes" and holds_bytes(field.type) for field in kind)
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    return _pick(path, "image", _IMAGE_NAMES, [field.name for field in schema if holds_bytes(field.type)], schema)


def _label_column(path: Path, schema: Any) -> str:
    from pyarrow import types

    integers = [field.name for field in schema if types.is_integer(field.type)]
    return _pick(path, "label", _LABEL_NAMES, [name for name in integers if name in _LABEL_NAMES], schema)


def _pick(path: Path, what: str, preferred: tuple[str, ...], found: list[str], schema: Any) -> str:
    for name in (*preferred, *found):
        if name in found:
            return name
    raise ValueError(f"{path} has no {what} column among {schema.names}: name it {' or '.join(preferred)}")


def _class_names(schema: Any, label: str) -> tuple[str, ...]:
    """The names Hugging Face's metadata gives to the label's values; empty without such metadata."""
    try:
        feature = json.loads(schema.metadata[b"huggingface"])["info"]["features"][label]
        return tuple(str(name) for name in feature["names"])
    except (KeyError, TypeError, ValueError):
        return ()
