"""Finds a data set by its name or path."""

import os
from collections.abc import Sequence
from pathlib import Path

from petra.data.builtin import digits, synthetic
from petra.data.cifar import read_cifar
from petra.data.dataset import Data
from petra.data.hugging_face import read_hub_images
from petra.data.image_files import ImageFileData
from petra.data.image_folder import read_image_folder
from petra.data.images import ImageData
from petra.data.memory_images import resizable
from petra.data.parquet_images import read_parquet_images
from petra.data.sentences import read_sentences
from petra.data.tar_images import read_tar_images
from petra.data.text import read_text
from petra.data.token_files import read_tokens

_SENTENCES = "labelled texts: train.tsv and test.tsv (or dev.tsv), or parquet, with columns sentence and label"
_IMAGES = (
    "CIFAR-10 or CIFAR-100 as published, Python or binary version",
    "Hugging Face parquet: train*.parquet and test*.parquet, here or in a folder below",
    "tar files: KEY.jpg with KEY.cls or KEY.json in train*.tar and test*.tar",
    "image files: train/<class>/*.png and test/<class>/*.png, or <class>/*.png (or jpg, bmp, webp, gif, tiff, ppm)",
)


def load_data(
    spec: str,
    *,
    seed: int = 0,
    seq_len: int | None = None,
    vocab_size: int | None = None,
    vocabulary: Sequence[str] = (),
    test_only: bool = False,
    image_size: int | None = None,
    test_fraction: float | None = None,
) -> Data:
    """Load a data set by its name or path.

    Args:
        spec: `digits`, `synthetic[:CxHxW:classes[:train_samples]]`, `text:FILE` (characters), `bytes:FILE`,
            `tokens:FOLDER` of `petra tokenize`, `hf:NAME` or `hf:FOLDER` for images of the library `datasets`, or a
            folder with images or labelled texts.
        seed: Seed of synthetic data; other data does not depend on it.
        seq_len: Tokens per sample of text; by default 256, and 64 for labelled texts.
        vocab_size: Maximum number of entries in the vocabulary of labelled texts, by default 8192.
        vocabulary: An existing vocabulary to encode text with; by default, it is built from the text.
        test_only: Accept a folder without a training split. The test split is then used for both.
        image_size: Height and width of the images that a network gets. Images of another size are then cropped and
            resized when they are needed, and image files are not read into memory. By default, images of one size keep
            it, and others become 224×224.
        test_fraction: Share of the images that is held out for testing, if a folder has no test split; by default 0.1
            for class folders and tar files.

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
        _reject_image_options(spec, "text", image_size, test_fraction)
        if kind == "tokens":
            return read_tokens(Path(os.path.expanduser(rest)), seq_len, test_only)
        return _load_text(kind, rest, seq_len, vocabulary)
    if kind in ("digits", "synthetic") and (kind == "synthetic" or not rest):
        _reject_text_options(spec, seq_len, vocab_size)
        _reject_image_options(spec, "a test split", None, test_fraction)
        return _resized(synthetic(spec, seed) if kind == "synthetic" else digits(), image_size)
    if kind == "hf":
        _reject_text_options(spec, seq_len, vocab_size)
        return read_hub_images(rest, image_size, test_fraction)
    folder = os.path.expanduser(spec)
    if not os.path.exists(folder):
        raise FileNotFoundError(
            f"no data set or folder {spec!r}: give digits, synthetic, text:FILE, bytes:FILE, tokens:FOLDER, hf:NAME or "
            "an existing folder"
        )
    if not os.path.isdir(folder):
        raise ValueError(f"{spec!r} is a file: give its folder, or text:{spec} to train a language model on it")
    if (sentences := read_sentences(Path(folder), seq_len, vocab_size, vocabulary, test_only)) is not None:
        _reject_image_options(spec, "text", image_size, test_fraction)
        return sentences
    if (images := _read_images(Path(folder), test_only, image_size, test_fraction)) is not None:
        _reject_text_options(spec, seq_len, vocab_size)
        return images
    known = "; ".join([*_IMAGES, _SENTENCES])
    raise ValueError(f"{spec!r} contains no data set in a known format: give a folder of {known}")


def _read_images(
    folder: Path, test_only: bool, image_size: int | None, test_fraction: float | None
) -> ImageData | ImageFileData | None:
    fixed = read_cifar(folder, test_only) or read_parquet_images(folder, test_only, image_size)
    if fixed is not None:
        _reject_image_options(str(folder), "a test split", None, test_fraction)
        return _resized(fixed, image_size) if isinstance(fixed, ImageData) else fixed
    return read_tar_images(folder, test_only, image_size, test_fraction) or read_image_folder(
        folder, test_only, image_size, test_fraction
    )


def _resized(data: ImageData, size: int | None) -> ImageData | ImageFileData:
    """Images in memory that become squares of another size when they are needed."""
    if size is None or data.input_shape[1:] == (size, size):
        return data
    return resizable(data, size)


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


def _reject_image_options(spec: str, what: str, image_size: int | None, test_fraction: float | None) -> None:
    for name, value in (("--image-size", image_size), ("--test-fraction", test_fraction)):
        if value is not None:
            raise ValueError(f"{name} is {value}, but {spec} has {what}: leave it out")
