"""Columns of parquet files, and the errors of files that are not what they should be."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LABEL_NAMES = ("label", "fine_label", "labels")
TEXT_NAMES = ("sentence", "text", "review", "content")


def find_parquet(folder: Path, part: str = "train") -> Path | None:
    """Where ``train*.parquet`` lies: here, in data/, or in the only folder below, as on the Hugging Face hub."""
    files = f"{part}*.parquet"
    below = sorted(child for child in folder.iterdir() if child.is_dir() and any(child.glob(files)))
    if any(folder.glob(files)):
        return folder
    if len(below) > 1 and folder / "data" not in below:
        names = ", ".join(str(child) for child in below)
        raise ValueError(f"{folder} holds more than one data set: give one of {names}")
    return next((child for child in below if child.name == "data"), below[0] if below else None)


def read_schema(path: Path) -> Any:
    """Names and types of the columns."""
    return _read(path, lambda parquet: parquet.read_schema(path))


def read_table(path: Path, columns: list[str]) -> Any:
    """Some of the columns."""
    return _read(path, lambda parquet: parquet.read_table(path, columns=columns).combine_chunks())


def _read(path: Path, read: Any) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"reading {path} needs pyarrow: pip install 'petra[images]'") from error
    try:
        return read(parquet)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is not a readable parquet file ({type(error).__name__}): download it again"
        ) from error


def byte_columns(schema: Any) -> list[str]:
    """The columns that hold bytes, as encoded images do, by themselves or in a structure."""
    from pyarrow import types

    def holds_bytes(kind: Any) -> bool:
        if types.is_struct(kind):
            return any(field.name == "bytes" and holds_bytes(field.type) for field in kind)
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    return [field.name for field in schema if holds_bytes(field.type)]


def pick(path: Path, what: str, preferred: tuple[str, ...], found: list[str], schema: Any) -> str:
    """The first of the preferred names that is found, or the first that is found at all."""
    for name in (*preferred, *found):
        if name in found:
            return name
    raise ValueError(f"{path} has no {what} column among {schema.names}: name it {' or '.join(preferred)}")


def class_names(schema: Any, label: str) -> tuple[str, ...]:
    """The names Hugging Face's metadata gives to the label's values; empty without such metadata."""
    try:
        feature = json.loads(schema.metadata[b"huggingface"])["info"]["features"][label]
        return tuple(str(name) for name in feature["names"])
    except (KeyError, TypeError, ValueError):
        return ()


def agreed_names(where: Path, told: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The names of the classes that all files tell, but for those that tell none."""
    found = list(dict.fromkeys(names for names in told if names))
    if len(found) > 1:
        raise ValueError(
            f"{where}: files number their classes differently, {', '.join(found[0][:5])}… and "
            f"{', '.join(found[1][:5])}…: write them anew with the same order of names"
        )
    return found[0] if found else ()
