"""Reads texts with a class each, from tab-separated files or from parquet."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petra.training.data.columns import (
    LABEL_NAMES,
    TEXT_NAMES,
    agreed_names,
    byte_columns,
    class_names,
    find_parquet,
    pick,
    read_schema,
    read_table,
)
from petra.training.data.text import decode_utf8

_TEST_NAMES = ("test", "dev", "valid", "validation", "val")


@dataclass(frozen=True)
class Labelled:
    """Texts and their classes; no labels at all where the file tells none, as in the test splits of competitions."""

    texts: list[str]
    labels: list[int]
    class_names: tuple[str, ...] = ()


def read_labelled(folder: Path, test_only: bool = False) -> tuple[Labelled, Labelled] | None:
    """Training and test split of a folder; None when it holds no texts.

    They are ``train.tsv`` and ``test.tsv``, or parquet files ``train*`` and ``test*`` (see `find_parquet`). Where the
    test split is missing or has no labels, ``dev``, ``valid``, ``validation`` or ``val`` takes its place.
    With ``test_only`` the training split may be missing, and what stands for the test split stands for it too.
    """
    for name in ("train", *_TEST_NAMES) if test_only else ("train",):
        if (folder / f"{name}.tsv").is_file():
            return _both(folder, "{}.tsv", _read_tsv)
        if (root := find_parquet(folder, name)) is not None:
            schema = read_schema(min(root.glob(f"{name}*.parquet")))
            if _text_columns(schema) and not byte_columns(schema):
                return _both(root, "{}*.parquet", _read_parquet)
    return None


def _both(root: Path, pattern: str, read: Callable[[Path], Labelled]) -> tuple[Labelled, Labelled]:
    def part(name: str) -> Labelled | None:
        files = [(path, read(path)) for path in sorted(root.glob(pattern.format(name)))]
        bare = [path for path, one in files if not one.labels]
        if bare and name == "train":
            raise ValueError(f"{bare[0]} has no labels: give a column {' or '.join(LABEL_NAMES)}")
        if bare or not files:
            return None
        parts = [one for _, one in files]
        texts = [text for one in parts for text in one.texts]
        names = agreed_names(root, (one.class_names for one in parts))
        return Labelled(texts, [label for one in parts for label in one.labels], names)

    train = part("train")
    for name in _TEST_NAMES:
        if (test := part(name)) is not None:
            train = test if train is None else train
            agreed_names(root, (train.class_names, test.class_names))
            return train, test
    names = ", ".join(pattern.format(name) for name in _TEST_NAMES)
    has = pattern.format("train") if train else "texts"
    raise ValueError(f"{root} has {has} but none of {names} with labels: add one")


def _read_tsv(path: Path) -> Labelled:
    """Lines of columns that the first line names, or of text and label if it names none; nothing is quoted."""
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
        raise ValueError(f"{path} is empty but for its first line: give lines of text, a tab and a label")
    for number, row in enumerate(rows, first + 1):
        if len(row) != len(header):
            mend = "keep tabs out of texts" if len(row) > len(header) else "put tabs between its columns"
            raise ValueError(f"{path} line {number} has {len(row)} columns, not {len(header)}: {mend}")
    texts = [row[text] for row in rows]
    if label is None:
        return Labelled(texts, [])
    labels = [_whole(row[label], f"{path} line {number}") for number, row in enumerate(rows, first + 1)]
    return _checked(path, texts, labels, first + 1)


def _read_parquet(path: Path) -> Labelled:
    schema = read_schema(path)
    text = pick(path, "text", TEXT_NAMES, _text_columns(schema), schema)
    label = next((name for name in LABEL_NAMES if name in schema.names), None)
    table = read_table(path, [text] if label is None else [text, label])
    texts = table.column(text).to_pylist()
    if None in texts:
        raise ValueError(f"{path} row {texts.index(None)} holds no text: remove the row")
    if label is None:
        return Labelled(texts, [])
    labels = table.column(label).to_pylist()
    for row, value in enumerate(labels):
        if not isinstance(value, int):
            raise ValueError(f"{path} row {row} has the label {value!r}: give whole numbers from 0")
    return _checked(path, texts, [int(value) for value in labels], 0, class_names(schema, label))


def _checked(path: Path, texts: list[str], labels: list[int], first: int, names: tuple[str, ...] = ()) -> Labelled:
    if labels and all(label == -1 for label in labels):  # how unlabelled splits are often written
        return Labelled(texts, [])
    for row, label in enumerate(labels, first):
        if label < 0:
            raise ValueError(f"{path}: label {label} in row {row} is negative: number the classes from 0")
    if not labels:
        raise ValueError(f"{path} is empty: give some texts")
    return Labelled(texts, labels, names)


def _whole(text: str, where: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{where} has the label {text[:40]!r}: give a whole number from 0") from None


def _text_columns(schema: Any) -> list[str]:
    from pyarrow import types

    def holds_text(kind: Any) -> bool:
        kind = kind.value_type if types.is_dictionary(kind) else kind  # how categories are written
        return bool(types.is_string(kind) or types.is_large_string(kind))

    strings = [field.name for field in schema if holds_text(field.type)]
    return [name for name in TEXT_NAMES if name in strings]
