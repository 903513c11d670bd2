"""Finds a data set by the name or the path a user writes."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from petra.training.data.builtin import digits, synthetic
from petra.training.data.cifar import read_cifar
from petra.training.data.folder import read_folder
from petra.training.data.images import ImageData
from petra.training.data.parquet import read_parquet
from petra.training.data.protocol import Data
from petra.training.data.sentences import read_sentences
from petra.training.data.text import read_text

_SENTENCES = "texts with labels: train.tsv and test.tsv (or dev.tsv), or parquet, with columns sentence and label"
_IMAGE_FOLDERS: tuple[tuple[Callable[[Path, bool], ImageData | None], str], ...] = (
    (read_cifar, "CIFAR-10 or CIFAR-100 as published, Python or binary version"),
    (read_parquet, "Hugging Face parquet: train*.parquet and test*.parquet, here or in a folder below"),
    (read_folder, "image files: train/<class>/*.png and test/<class>/*.png (or jpg, bmp, webp, gif, tiff, ppm)"),
)


def load(
    spec: str,
    *,
    seed: int = 0,
    length: int | None = None,
    vocab_size: int | None = None,
    vocabulary: Sequence[str] = (),
    test_only: bool = False,
) -> Data:
    """The data set that `spec` names: digits, synthetic[:CxHxW:classes[:samples]], text:FILE, bytes:FILE, a folder.

    `seed` matters to synthetic data only. `length` is the number of tokens in a sample of text, `vocab_size` the most
    entries of a vocabulary of words. Text is read with `vocabulary`, if it is given, and not with one of its own.
    With `test_only`, a folder may lack its train part, and the test part takes its place.
    """
    kind, _, rest = spec.partition(":")
    if kind in ("text", "bytes"):
        return _load_text(kind, rest, length, vocab_size, vocabulary)
    if kind in ("digits", "synthetic") and (kind == "synthetic" or not rest):
        _refuse_text_options(spec, length, vocab_size)
        return synthetic(spec, seed) if kind == "synthetic" else digits()
    folder = os.path.expanduser(spec)
    if not os.path.exists(folder):
        raise FileNotFoundError(
            f"no data set or folder {spec!r}: give digits, synthetic, text:FILE, bytes:FILE or an existing folder"
        )
    if not os.path.isdir(folder):
        raise ValueError(f"{spec!r} is a file: give the folder that holds it, or text:{spec} to model it as text")
    if (sentences := read_sentences(Path(folder), length, vocab_size, vocabulary, test_only)) is not None:
        return sentences
    for read, _ in _IMAGE_FOLDERS:
        if (data := read(Path(folder), test_only)) is not None:
            _refuse_text_options(spec, length, vocab_size)
            return data
    known = "; ".join([*(line for _, line in _IMAGE_FOLDERS), _SENTENCES])
    raise ValueError(f"{spec!r} holds no data set that is understood: give a folder of {known}")


def _load_text(kind: str, path: str, length: int | None, vocab_size: int | None, vocabulary: Sequence[str]) -> Data:
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {path!r}: give {kind}:FILE with the path of a text")
    if vocab_size is not None:
        raise ValueError(
            f"--vocab-size is {vocab_size}, but {kind}:FILE has its own vocabulary: "
            "leave it out, or give a folder of sentences with labels"
        )
    return read_text(file, "bytes" if kind == "bytes" else "characters", length, vocabulary)


def _refuse_text_options(spec: str, length: int | None, vocab_size: int | None) -> None:
    for name, value in (("--length", length), ("--vocab-size", vocab_size)):
        if value is not None:
            raise ValueError(f"{name} is {value}, but {spec} holds images: leave it out, or give text")
