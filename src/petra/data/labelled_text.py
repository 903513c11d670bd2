"""Reads labelled texts from tab-separated files or from parquet files."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from petra.data.text import decode_utf8

_TEST_NAMES = ("test", "dev", "valid", "validation", "val")


@dataclass(frozen=True)
class LabelledTexts:
    """Texts and their classes. `labels` is empty for a file without labels, such as the test split of a competition."""

    texts: list[str]
    labels: list[int]
    class_names: tuple[str, ...] = ()


def read_labelled_texts(folder: Path, test_only: bool = False) -> tuple[LabelledTexts, LabelledTexts] | None:
    """Read the training and the test split of a folder; None if it contains no texts.

    They are `train.tsv` and `test.tsv`, or parquet files `train*` and `test*` (see `find_parquet`). If the test split
    is missing or has no labels, `dev`, `valid`, `validation` or `val` is used instead. With `test_only`, the training
    split may be missing; the test split is then used for both.
    """
    for name in ("train", *_TEST_NAMES) if test_only else ("train",):
        if (folder / f"{name}.tsv").is_file():
            return _read_splits(folder, "{}.tsv", _read_tsv)
        if (root := find_parquet(folder, name)) is not None:
            schema = read_schema(min(root.glob(f"{name}*.parquet")))
            if _text_columns(schema) and not byte_columns(schema):
                return _read_splits(root, "{}*.parquet", _read_parquet)
    return None


def _read_splits(
    root: Path, pattern: str, read: Callable[[Path], LabelledTexts]
) -> tuple[LabelledTexts, LabelledTexts]:
    def part(name: str) -> LabelledTexts | None:
        files = [(path, read(path)) for path in sorted(root.glob(pattern.format(name)))]
        unlabelled = [path for path, one in files if not one.labels]
        if unlabelled and name == "train":
            raise ValueError(f"{unlabelled[0]} has no labels: give a column {' or '.join(LABEL_NAMES)}")
        if unlabelled or not files:
            return None
        parts = [one for _, one in files]
        texts = [text for one in parts for text in one.texts]
        names = common_class_names(root, (one.class_names for one in parts))
        return LabelledTexts(texts, [label for one in parts for label in one.labels], names)

    train = part("train")
    for name in _TEST_NAMES:
        if (test := part(name)) is not None:
            train = test if train is None else train
            common_class_names(root, (train.class_names, test.class_names))
            return train, test
    names = ", ".join(pattern.format(name) for name in _TEST_NAMES)
    has = pattern.format("train") if train else "texts"
    raise ValueError(f"{root} has {has} but none of {names} with labels: add one")


def _read_tsv(path: Path) -> LabelledTexts:
    """Read lines of columns that the first line names, or of text and label without names; nothing is quoted."""
    content = decode_utf8(path, path.read_bytes(), "for example with iconv")
    lines = [line.removesuffix("\r") for line in content.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise ValueError(f"{path} is empty: give lines of text, a tab and a label")
    header = lines[0].lower().split("\t")
    text = next((header.index(name) for name in TEXT_NAMES if name in header), None)
    label = next((header.index(name) for name in LABEL_NAMES if name in header), None)
    if text is None:
        if label is not None or len(header) != 2:
            raise ValueError(
                f"{path} has no text column among {[name[:30] for name in header]}: "
                f"name it {' or '.join(TEXT_NAMES)} in the first line"
            )
        text, label, first = 0, 1, 0
    else:
        first = 1
    rows = [line.split("\t") for line in lines[first:]]
    if not rows:
        raise ValueError(f"{path} has no lines after the first: give lines of text, a tab and a label")
    for number, row in enumerate(rows, first + 1):
        if len(row) != len(header):
            remedy = "keep tabs out of texts" if len(row) > len(header) else "put tabs between its columns"
            raise ValueError(f"{path} line {number} has {len(row)} columns, not {len(header)}: {remedy}")
    texts = [row[text] for row in rows]
    if label is None:
        return LabelledTexts(texts, [])
    labels = [_parse_label(row[label], f"{path} line {number}") for number, row in enumerate(rows, first + 1)]
    return _checked(path, texts, labels, first + 1)


def _read_parquet(path: Path) -> LabelledTexts:
    schema = read_schema(path)
    text = pick_column(path, "text", TEXT_NAMES, _text_columns(schema), schema)
    label = next((name for name in LABEL_NAMES if name in schema.names), None)
    table = read_table(path, [text] if label is None else [text, label])
    texts = table.column(text).to_pylist()
    if None in texts:
        raise ValueError(f"{path} row {texts.index(None)} contains no text: remove the row")
    if label is None:
        return LabelledTexts(texts, [])
    labels = table.column(label).to_pylist()
    for row, value in enumerate(labels):
        if not isinstance(value, int):
            raise ValueError(f"{path} row {row} has the label {value!r}: number the classes from 0")
    return _checked(path, texts, [int(value) for value in labels], 0, read_class_names(schema, label))


def _checked(path: Path, texts: list[str], labels: list[int], first: int, names: tuple[str, ...] = ()) -> LabelledTexts:
    if labels and all(label == -1 for label in labels):  # a common notation for unlabelled splits
        return LabelledTexts(texts, [])
    for row, label in enumerate(labels, first):
        if label < 0:
            raise ValueError(f"{path}: label {label} in row {row} is negative: number the classes from 0")
    if not labels:
        raise ValueError(f"{path} is empty: give some texts")
    return LabelledTexts(texts, labels, names)


def _parse_label(text: str, where: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{where} has the label {text[:40]!r}: number the classes from 0") from None


def _text_columns(schema: Any) -> list[str]:
    from pyarrow import types

    def holds_text(kind: Any) -> bool:
        kind = kind.value_type if types.is_dictionary(kind) else kind  # categories
        return bool(types.is_string(kind) or types.is_large_string(kind))

    strings = [field.name for field in schema if holds_text(field.type)]
    return [name for name in TEXT_NAMES if name in strings]
