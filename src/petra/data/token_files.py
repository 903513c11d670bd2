"""Tokens in files, which are mapped into memory: `petra tokenize` writes them, `--data tokens:FOLDER` reads them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from petra.data.dataset import SplitName
from petra.data.text import DEFAULT_SEQ_LEN, MappedWindowSplit, WindowSplit

INFO, TOKENIZER = "tokens.json", "tokenizer.json"
TOKEN_FILES: dict[SplitName, str] = {"train": "train.bin", "test": "test.bin"}

_VERSION = 1
_RESIDENT_BYTES = 2**29
"""Size up to which a token file is copied to a GPU as a whole."""
_READ_TOKENS = 2**22


@dataclass(frozen=True)
class TokenCounts:
    """One split in `tokens.json`."""

    tokens: int
    """Number of tokens, with the end-of-text tokens."""
    bytes: int
    """Bytes of the text in UTF-8."""
    documents: int
    """Number of documents."""
    sha256: str
    """Hash of the token file."""


@dataclass(frozen=True)
class TokenInfo:
    """The contents of `tokens.json`."""

    vocab_size: int
    """Number of different tokens."""
    end_of_text: int
    """The token after each document."""
    tokenizer_sha256: str
    """Hash of `tokenizer.json`."""
    train: TokenCounts | None
    """The training split; None if there is only a test split."""
    test: TokenCounts
    """The test split."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tokens in the files: little-endian, 2 bytes if the vocabulary fits."""
        return token_dtype(self.vocab_size)

    def counts(self, split: SplitName) -> TokenCounts | None:
        """Return one split.

        Args:
            split: `"train"` or `"test"`.

        Returns:
            Its counts; None if there is no such split.

        """
        return self.train if split == "train" else self.test

    @classmethod
    def read(cls, folder: Path) -> TokenInfo:
        """Read `tokens.json`.

        Args:
            folder: The folder that `petra tokenize` has written.

        Returns:
            Its contents.

        Raises:
            FileNotFoundError: If there is no such folder.
            ValueError: If the folder holds no tokens, or the file is damaged.

        """
        if not folder.is_dir():
            raise FileNotFoundError(
                f"there is no folder {str(folder)!r}: give tokens:FOLDER with one of `petra tokenize`"
            )
        file = folder / INFO
        if not file.exists():
            raise ValueError(f"{folder} contains no {INFO}: give a folder that `petra tokenize` has written")
        try:
            values = json.loads(file.read_text())
            version = values.pop("version")
            if version != _VERSION:
                raise ValueError(f"its version is {version}, not {_VERSION}")
            values.pop("dtype")
            train, test = values.pop("train"), TokenCounts(**values.pop("test"))
            return cls(train=None if train is None else TokenCounts(**train), test=test, **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{file} is damaged ({error}): tokenize the text again") from error

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values.

        Returns:
            The contents of `tokens.json`.

        """
        return {"version": _VERSION, "dtype": self.dtype.name, **asdict(self)}


@dataclass(frozen=True, eq=False)
class TokenData:
    """Token files in a folder. A sample is a window of consecutive tokens, which may contain several documents.

    Raises:
        ValueError: If a file is missing, damaged or too short.

    """

    name: str
    """The name that messages use."""
    folder: Path
    """The folder of the files."""
    info: TokenInfo
    """The contents of `tokens.json`."""
    seq_len: int
    """Tokens per sample."""
    test_only: bool = False
    """Use the test split for both splits if there is no training split."""

    vocabulary = ()

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"{self.name}: seq_len is {self.seq_len}: give 1 or more")
        if self.info.train is None and not self.test_only:
            raise ValueError(f"{self.folder} has only a test split: give --train to `petra tokenize` as well")
        for split in TOKEN_FILES:
            counts = self.info.counts(split)
            if counts is None:
                continue
            check_size(self.folder, self.info, split)
            if counts.tokens <= self.seq_len:
                raise ValueError(
                    f"{self.name}: the {split} split has {counts.tokens} tokens, too few for a sample of "
                    f"{self.seq_len} and the next token: give a longer text or a smaller --seq-len"
                )
        check_tokenizer(self.folder, self.info)

    @property
    def unit(self) -> str:
        return "windows"

    @property
    def arguments(self) -> dict[str, Any]:
        return {"vocab_size": self.info.vocab_size, "seq_len": self.seq_len}

    @property
    def bytes_per_token(self) -> float:
        """Mean number of bytes of text for each token of the test split."""
        return self.info.test.bytes / self.info.test.tokens

    @property
    def content_hash(self) -> str:
        """Hash of the contents, from the hashes in `tokens.json`, so that the files are not read."""
        return hashlib.sha256(json.dumps(self.info.to_json(), sort_keys=True).encode()).hexdigest()

    def split(self, name: SplitName, *, augment: bool, device: torch.device, dtype: torch.dtype) -> WindowSplit:
        """Open one split.

        On a GPU, a file of at most 512 MiB is copied there as a whole. Otherwise, the file stays where it is, and only
        the windows of a batch are read and copied. The batches are the same.

        Args:
            name: `"train"` or `"test"`.
            augment: Randomly crop and flip images, or shift windows of text.
            device: Device of the batches.
            dtype: Floating-point type of images. Tokens are always int64.

        Returns:
            The split.
        """
        if self.info.counts(name) is None:
            name = "test"
        mapped = map_tokens(self.folder, self.info, name)
        if device.type == "cpu" or mapped.nbytes > _RESIDENT_BYTES:
            return MappedWindowSplit(mapped, self.seq_len, augment, device)
        signed = np.array(mapped).view(np.int16 if mapped.itemsize == 2 else np.int32)
        return WindowSplit(torch.from_numpy(signed), self.seq_len, augment, device)


def read_tokens(folder: Path, seq_len: int | None = None, test_only: bool = False) -> TokenData:
    """Open a folder that `petra tokenize` has written."""
    info = TokenInfo.read(folder)
    return TokenData(
        folder.resolve().name, folder, info, DEFAULT_SEQ_LEN if seq_len is None else seq_len, test_only=test_only
    )


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type of tokens in files: little-endian, with 2 bytes if the vocabulary fits, else with 4."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def map_tokens(folder: Path, info: TokenInfo, split: SplitName) -> NDArray[Any]:
    """Map a token file into memory, without reading it."""
    return np.memmap(folder / TOKEN_FILES[split], info.dtype, "r")


def check_size(folder: Path, info: TokenInfo, split: SplitName) -> None:
    """Raise ValueError unless a token file exists and has the size that `tokens.json` says."""
    file, counts = folder / TOKEN_FILES[split], info.counts(split)
    assert counts is not None
    if not file.exists():
        raise ValueError(f"{file} is missing: restore it, or tokenize the text again")
    size, wanted = file.stat().st_size, counts.tokens * info.dtype.itemsize
    if size != wanted:
        raise ValueError(
            f"{file} has {size} bytes, not {wanted} as {INFO} says: restore it, or tokenize the text again"
        )


def check_tokenizer(folder: Path, info: TokenInfo) -> None:
    """Raise ValueError unless `tokenizer.json` is the one that the tokens were made with."""
    file = folder / TOKENIZER
    if not file.exists():
        raise ValueError(f"{file} is missing: restore it, because it defines the tokens")
    if hashlib.sha256(file.read_bytes()).hexdigest() != info.tokenizer_sha256:
        raise ValueError(f"{file} is not the tokenizer that the tokens were made with: restore it")


def check_tokens(folder: Path) -> TokenInfo:
    """Read all token files in a folder, and compare them with `tokens.json`.

    Args:
        folder: The folder that `petra tokenize` has written.

    Returns:
        The contents of `tokens.json`.

    Raises:
        ValueError: If a file is not what it was when it was written.

    """
    info = TokenInfo.read(folder)
    check_tokenizer(folder, info)
    for split, name in TOKEN_FILES.items():
        if (counts := info.counts(split)) is None:
            continue
        check_size(folder, info, split)
        hashed, mapped = hashlib.sha256(), map_tokens(folder, info, split)
        for first in range(0, len(mapped), _READ_TOKENS):
            hashed.update(mapped[first : first + _READ_TOKENS].data)
        if hashed.hexdigest() != counts.sha256:
            raise ValueError(
                f"{folder / name} has changed since it was written: restore it, or tokenize the text again"
            )
    return info
