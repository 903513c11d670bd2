"""Finds a data set by its name or path."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from petra.data.builtin import digits, synthetic
from petra.data.cifar import read_cifar
from petra.data.dataset import Data
from petra.data.image_folder import read_image_folder
from petra.data.images import ImageData
from petra.data.parquet_images import read_parquet_images
from petra.data.sentences import read_sentences
from petra.data.text import read_text
from petra.data.token_files import read_tokens

_SENTENCES = "labelled texts: train.tsv and test.tsv (or dev.tsv), or parquet, with columns sentence and label"
_IMAGE_FOLDERS: tuple[tuple[Callable[[Path, bool], ImageData | None], str], ...] = (
    (read_cifar, "CIFAR-10 or CIFAR-100 as published, Python or binary version"),
    (read_parquet_images, "Hugging Face parquet: train*.parquet and test*.parquet, here or in a folder below"),
    (read_image_folder, "image files: train/<class>/*.png and test/<class>/*.png (or jpg, bmp, webp, gif, tiff, ppm)"),
)


def load_data(
    spec: str,
    *,
    seed: int = 0,
    seq_len: int | None = None,
    vocab_size: int | None = None,
    vocabulary: Sequence[str] = (),
    test_only: bool = False,
) -> Data:
    """Load a data set by its name or path.

    Args:
        spec: `digits`, `synthetic[:CxHxW:classes[:train_samples]]`, `text:FILE` (characters), `bytes:FILE`,
            `tokens:FOLDER` of `petra tokenize`, or a folder with images or labelled texts.
        seed: Seed of synthetic data; other data does not depend on it.
        seq_len: Tokens per sample of text; by default 256, and 64 for labelled texts.
        vocab_size: Maximum number of entries in the vocabulary of labelled texts, by default 8192.
        vocabulary: An existing vocabulary to encode text with; by default, it is built from the text.
        test_only: Accept a folder without a training split. The test split is then used for both.

    Returns:
        The data set.

    Raises:
        FileNotFoundError: If the file or folder does not exist.
        ValueError: If the folder contains no data set, if a file is malformed, or if an option does not apply.

    Example:
        >>> load_data("digits").input_shape
        (1, 8, 8)

    """
    kind, _, rest = spec.partition(":")
    if kind in ("text", "bytes", "tokens"):
        _reject_vocab_size(kind, vocab_size)
        if kind == "tokens":
            return read_tokens(Path(os.path.expanduser(rest)), seq_len, test_only)
        return _load_text(kind, rest, seq_len, vocabulary)
    if kind in ("digits", "synthetic") and (kind == "synthetic" or not rest):
        _reject_text_options(spec, seq_len, vocab_size)
        return synthetic(spec, seed) if kind == "synthetic" else digits()
    folder = os.path.expanduser(spec)
    if not os.path.exists(folder):
        raise FileNotFoundError(
            f"no data set or folder {spec!r}: give digits, synthetic, text:FILE, bytes:FILE, tokens:FOLDER or an "
            "existing folder"
        )
    if not os.path.isdir(folder):
        raise ValueError(f"{spec!r} is a file: give its folder, or text:{spec} to train a language model on it")
    if (sentences := read_sentences(Path(folder), seq_len, vocab_size, vocabulary, test_only)) is not None:
        return sentences
    for read, _ in _IMAGE_FOLDERS:
        if (data := read(Path(folder), test_only)) is not None:
            _reject_text_options(spec, seq_len, vocab_size)
            return data
    known = "; ".join([*(text for _, text in _IMAGE_FOLDERS), _SENTENCES])
    raise ValueError(f"{spec!r} contains no data set in a known format: give a folder of {known}")


def _load_text(kind: str, path: str, seq_len: int | None, vocabulary: Sequence[str]) -> Data:
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {path!r}: give {kind}:FILE with the path of a text file")
    return read_text(file, "bytes" if kind == "bytes" else "characters", seq_len, vocabulary)


def _reject_vocab_size(kind: str, vocab_size: int | None) -> None:
    if vocab_size is not None:
        raise ValueError(
            f"--vocab-size is {vocab_size}, but {kind}:{'FOLDER' if kind == 'tokens' else 'FILE'} has a fixed "
            "vocabulary: leave it out, or give a folder of labelled texts"
        )


def _reject_text_options(spec: str, seq_len: int | None, vocab_size: int | None) -> None:
    for name, value in (("--seq-len", seq_len), ("--vocab-size", vocab_size)):
        if value is not None:
            raise ValueError(f"{name} is {value}, but {spec} contains images: leave it out, or give text")
