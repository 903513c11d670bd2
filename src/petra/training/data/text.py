"""Text to model: a file as one long row of tokens, characters or bytes, of which the last tenth is the test split."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petra.training.data.protocol import SplitName
from petra.training.data.seeds import generator

LENGTH = 256
"""Tokens of a sample, unless told otherwise."""


class WindowSplit:
    """Windows of ``length`` tokens, one after the other; the targets of a window are its tokens one place on.

    With ``shifts``, the first window of an epoch begins at a random one of the first ``length`` places, the same for
    the whole epoch, so that windows do not overlap but are not cut at the same places every time. So that every epoch
    has as many windows, whatever its shift, there is then one less of them than would fit, if there are two.
    """

    def __init__(self, tokens: Tensor, length: int, shifts: bool, device: torch.device) -> None:
        self._tokens, self._length = tokens.to(device), length
        pairs = len(tokens) - 1  # of a token and the one after it
        self._count = pairs // length
        if shifts:
            self._count = max(1, (pairs + 1 - length) // length)
        self._most = min(length - 1, pairs - self._count * length) if shifts else 0
        self._places = torch.arange(length + 1, device=device)

    def __len__(self) -> int:
        return self._count

    def draw(self, count: int, seed: int, epoch: int, batch: int) -> Tensor | None:
        if self._most == 0:
            return None
        shift = torch.randint(0, self._most + 1, (1, 1), generator=generator(seed, "shift", epoch), device="cpu")
        return shift.expand(1, count).contiguous()

    def take(self, index: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
        starts = index * self._length
        if drawn is not None:
            starts = starts + drawn[0]
        windows = self._tokens[starts.unsqueeze(1) + self._places].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@dataclass(frozen=True, eq=False)
class TextData:
    """Two texts as rows of tokens, uint8 or int32, each long enough for one window."""

    name: str
    train_tokens: Tensor
    test_tokens: Tensor
    vocab_size: int
    length: int
    vocabulary: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"{self.name}: length is {self.length}: give 1 or more")
        for split, tokens in (("train", self.train_tokens), ("test", self.test_tokens)):
            if tokens.ndim != 1 or tokens.dtype not in (torch.uint8, torch.int32, torch.int64):
                raise ValueError(
                    f"{self.name}: {split} tokens are {tokens.dtype} of shape {tuple(tokens.shape)}: "
                    "give one row of uint8, int32 or int64"
                )
            if len(tokens) <= self.length:
                raise ValueError(
                    f"{self.name}: the {split} split has {len(tokens)} tokens, too few for a sample of {self.length} "
                    f"and the one after it: give a longer text or a smaller --length"
                )
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.vocab_size:
                raise ValueError(
                    f"{self.name}: {split} token {low if low < 0 else high} is outside 0..{self.vocab_size - 1}: "
                    "correct the size of the vocabulary"
                )

    @property
    def unit(self) -> str:
        return "windows"

    @property
    def arguments(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size, "length": self.length}

    def split(self, name: SplitName, *, augment: bool, device: torch.device, dtype: torch.dtype) -> WindowSplit:
        return WindowSplit(self.train_tokens if name == "train" else self.test_tokens, self.length, augment, device)


def read_text(
    path: Path, tokens: Literal["characters", "bytes"], length: int | None = None, known: Sequence[str] = ()
) -> TextData:
    """A file; the vocabulary is the characters that are in it, in order of their code points, or all 256 bytes.

    Characters may be given a vocabulary that is ``known`` already.
    """
    content = path.read_bytes()
    if not content:
        raise ValueError(f"{path} is empty: give a file with text in it")
    row: NDArray[Any]
    vocab_size, vocabulary = 256, tuple[str, ...]()
    if tokens == "bytes":
        row = np.frombuffer(content, np.uint8).copy()
    else:
        text = decode_utf8(path, content, "or read it as bytes:FILE")
        if not text:
            raise ValueError(f"{path} is empty but for a byte-order mark: give a file with text in it")
        vocabulary = tuple(known) or tuple(map(chr, np.unique(_points(text)).tolist()))
        vocab_size, row = len(vocabulary), encode_characters(text, vocabulary, str(path))
        row = row.astype(np.uint8 if vocab_size <= 256 else np.int32)
    whole = torch.from_numpy(row)
    cut = len(whole) - len(whole) // 10
    return TextData(path.name, whole[:cut], whole[cut:], vocab_size, LENGTH if length is None else length, vocabulary)


def encode_characters(text: str, vocabulary: Sequence[str], where: str) -> NDArray[Any]:
    """The number of each character in a vocabulary that is in order of code points; ``where`` says whose text it is."""
    points, known = _points(text), np.array([ord(character) for character in vocabulary], np.uint32)
    found = np.searchsorted(known, points).clip(max=len(known) - 1)
    if (strange := points[known[found] != points]).size:
        raise ValueError(
            f"{where} holds {chr(int(strange[0]))!r}, which is not among the {len(known)} characters that the network "
            "has been trained on: leave it out"
        )
    return found


def _points(text: str) -> NDArray[Any]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def decode_utf8(path: Path, content: bytes, remedy: str) -> str:
    """The text of a file, without the mark that some editors put in front."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}: convert it, {remedy}") from error
