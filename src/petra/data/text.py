"""Text for language models: a file as one long row of characters or bytes, whose last tenth is the test split."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petra.data.dataset import SplitName, keyed_generator

DEFAULT_SEQ_LEN = 256
"""Default number of tokens per sample."""


class WindowSplit:
    """Consecutive windows of `seq_len` tokens; the target of each token is the next one.

    With `random_shift`, the first window of an epoch begins at a random one of the first `seq_len` tokens, so that
    windows are cut elsewhere in each epoch but never overlap. There is then one window less than fits (but at least
    one), so that every epoch has the same number of windows for any shift.
    """

    def __init__(self, tokens: Tensor, seq_len: int, random_shift: bool, device: torch.device) -> None:
        self._tokens = tokens.to(device)
        self._set_windows(len(tokens), seq_len, random_shift, device)

    def _set_windows(self, tokens: int, seq_len: int, random_shift: bool, device: torch.device) -> None:
        self.device, self._seq_len = device, seq_len
        pairs = tokens - 1  # of a token and its target
        self._count = pairs // seq_len
        if random_shift:
            self._count = max(1, (pairs + 1 - seq_len) // seq_len)
        self._max_shift = min(seq_len - 1, pairs - self._count * seq_len) if random_shift else 0
        self._offsets = torch.arange(seq_len + 1, device=device)

    def __len__(self) -> int:
        return self._count

    def draw(self, count: int, seed: int, epoch: int, batch: int) -> Tensor | None:
        if self._max_shift == 0:
            return None
        generator = keyed_generator(seed, "shift", epoch)
        shift = torch.randint(0, self._max_shift + 1, (1, 1), generator=generator, device="cpu")
        return shift.expand(1, count).contiguous()

    def take(self, index: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
        starts = index * self._seq_len
        if drawn is not None:
            starts = starts + drawn[0]
        windows = self._gather(starts.unsqueeze(1) + self._offsets)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _gather(self, positions: Tensor) -> Tensor:
        tokens = self._tokens[positions].long()
        # PyTorch cannot index uint16 on every device: int16 has the bits of uint16.
        return tokens & 0xFFFF if self._tokens.dtype == torch.int16 else tokens


class MappedWindowSplit(WindowSplit):
    """The windows of a file that is mapped into memory: only those of a batch are read and copied to the device."""

    def __init__(self, tokens: NDArray[Any], seq_len: int, random_shift: bool, device: torch.device) -> None:
        self._mapped, self._target = tokens, device
        self._set_windows(len(tokens), seq_len, random_shift, torch.device("cpu"))

    def _gather(self, positions: Tensor) -> Tensor:
        # int32 halves the copy. From pinned memory it is asynchronous, so the host does not wait for the GPU.
        tokens = torch.from_numpy(self._mapped[positions.numpy()].astype(np.int32))
        if self._target.type == "cuda":
            tokens = tokens.pin_memory().to(self._target, non_blocking=True)
        return tokens.to(self._target).long()


@dataclass(frozen=True, eq=False)
class TextData:
    """A training and a test text in memory, as tokens. A sample is a window of consecutive tokens.

    Raises:
        ValueError: If the fields do not fit together.

    """

    name: str
    """The name that messages use."""
    train_tokens: Tensor
    """Training text, one row of uint8, int32 or int64, of more than `seq_len` tokens."""
    test_tokens: Tensor
    """Test text, one row of uint8, int32 or int64, of more than `seq_len` tokens."""
    vocab_size: int
    """Number of different tokens. Tokens are 0 to `vocab_size - 1`."""
    seq_len: int
    """Tokens per sample."""
    vocabulary: tuple[str, ...] = ()
    """The text of each token; empty if tokens are bytes."""

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"{self.name}: seq_len is {self.seq_len}: give 1 or more")
        for split, tokens in (("train", self.train_tokens), ("test", self.test_tokens)):
            if tokens.ndim != 1 or tokens.dtype not in (torch.uint8, torch.int32, torch.int64):
                raise ValueError(
                    f"{self.name}: {split} tokens are {tokens.dtype} of shape {tuple(tokens.shape)}: "
                    "give one row of uint8, int32 or int64"
                )
            if len(tokens) <= self.seq_len:
                raise ValueError(
                    f"{self.name}: the {split} split has {len(tokens)} tokens, too few for a sample of {self.seq_len} "
                    f"and the next token: give a longer text or a smaller --seq-len"
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
        return {"vocab_size": self.vocab_size, "seq_len": self.seq_len}

    @property
    def bytes_per_token(self) -> float:
        """Mean number of bytes of text for each token of the test split: 1 if tokens are bytes."""
        if not self.vocabulary:
            return 1.0
        sizes = torch.tensor([len(entry.encode()) for entry in self.vocabulary], device="cpu")
        counts = torch.bincount(self.test_tokens.cpu(), minlength=len(sizes))
        return int((counts * sizes).sum()) / len(self.test_tokens)

    def split(self, name: SplitName, *, augment: bool, device: torch.device, dtype: torch.dtype) -> WindowSplit:
        """Move one split to a device.

        Args:
            name: `"train"` or `"test"`.
            augment: Randomly crop and flip images, or shift windows of text.
            device: Device of the split.
            dtype: Floating-point type of images. Tokens are always int64.

        Returns:
            The split.
        """
        return WindowSplit(self.train_tokens if name == "train" else self.test_tokens, self.seq_len, augment, device)


def read_text(
    path: Path, tokens: Literal["characters", "bytes"], seq_len: int | None = None, characters: Sequence[str] = ()
) -> TextData:
    """Read a text file; the vocabulary is its characters in the order of their code points, or all 256 bytes.

    `characters` is an existing vocabulary to use instead of the file's own characters.
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
            raise ValueError(f"{path} is empty except for a byte-order mark: give a file with text in it")
        vocabulary = tuple(characters) or tuple(map(chr, np.unique(_code_points(text)).tolist()))
        vocab_size, row = len(vocabulary), encode_characters(text, vocabulary, str(path))
        row = row.astype(np.uint8 if vocab_size <= 256 else np.int32)
    whole = torch.from_numpy(row)
    cut = len(whole) - len(whole) // 10
    return TextData(
        path.name, whole[:cut], whole[cut:], vocab_size, DEFAULT_SEQ_LEN if seq_len is None else seq_len, vocabulary
    )


def encode_characters(text: str, vocabulary: Sequence[str], where: str) -> NDArray[Any]:
    """The index of each character in a vocabulary that is sorted by code points; `where` names the text in errors."""
    points, known = _code_points(text), np.array([ord(character) for character in vocabulary], np.uint32)
    indices = np.searchsorted(known, points).clip(max=len(known) - 1)
    if (unknown := points[known[indices] != points]).size:
        raise ValueError(
            f"{where} contains {chr(int(unknown[0]))!r}, which is not among the {len(known)} characters that the "
            "network was trained on: leave it out"
        )
    return indices


def _code_points(text: str) -> NDArray[Any]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def decode_utf8(path: Path, content: bytes, remedy: str) -> str:
    """Decode a file without the byte-order mark that some editors write."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}: convert it, {remedy}") from error
