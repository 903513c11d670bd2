"""Finds parquet files and reads their columns, with errors that name the file and the remedy."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LABEL_NAMES = ("label", "fine_label", "labels")
TEXT_NAMES = ("sentence", "text", "review", "content")


def find_parquet(folder: Path, part: str = "train") -> Path | None:
    """The folder of `train*.parquet`: this one, `data/`, or the only subfolder with one, as on the Hugging Face hub."""
    files = f"{part}*.parquet"
    subfolders = sorted(child for child in folder.iterdir() if child.is_dir() and any(child.glob(files)))
    if any(folder.glob(files)):
        return folder
    if len(subfolders) > 1 and folder / "data" not in subfolders:
        names = ", ".join(str(child) for child in subfolders)
        raise ValueError(f"{folder} contains more than one data set: give one of {names}")
    return next((child for child in subfolders if child.name == "data"), subfolders[0] if subfolders else None)


def read_schema(path: Path) -> Any:
    """Names and types of the columns."""
    return _read(path, lambda parquet: parquet.read_schema(path))


def read_table(path: Path, columns: list[str]) -> Any:
    """The given columns."""
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
    """The columns that contain bytes, as encoded images do, directly or in a struct."""
    from pyarrow import types

    def holds_bytes(kind: Any) -> bool:
        if types.is_struct(kind):
            return any(field.name == "bytes" and holds_bytes(field.type) for field in kind)
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    return [field.name for field in schema if holds_bytes(field.type)]


def pick_column(path: Path, what: str, preferred: tuple[str, ...], candidates: list[str], schema: Any) -> str:
    """The first candidate with a preferred name, or else the first candidate."""
    for name in (*preferred, *candidates):
        if name in candidates:
            return name
    raise ValueError(f"{path} has no {what} column among {schema.names}: name it {' or '.join(preferred)}")


def read_class_names(schema: Any, label: str) -> tuple[str, ...]:
    """The class names in Hugging Face's metadata; empty without such metadata."""
    try:
        feature = json.loads(schema.metadata[b"huggingface"])["info"]["features"][label]
        return tuple(str(name) for name in feature["names"])
    except (KeyError, TypeError, ValueError):
        return ()


def common_class_names(where: Path, names_per_file: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The class names that all files agree on; files without names are ignored."""
    found = list(dict.fromkeys(names for names in names_per_file if names))
    if len(found) > 1:
        raise ValueError(
            f"{where}: files number their classes differently, {', '.join(found[0][:5])}… and "
            f"{', '.join(found[1][:5])}…: write them again with the same order of names"
        )
    return found[0] if found else ()
