"""Labelled texts as rows of tokens, all of the same length."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petra.data.dataset import SplitName
from petra.data.labelled_text import LabelledTexts, read_labelled_texts
from petra.data.vocabulary import PAD, Vocabulary

DEFAULT_SEQ_LEN, DEFAULT_VOCAB_SIZE = 64, 8192
"""Default number of tokens per sample, and default limit of entries in the vocabulary."""


class SentenceSplit:
    """Tokens and labels on a device. Nothing about them is random."""

    def __init__(self, tokens: Tensor, labels: Tensor, device: torch.device) -> None:
        self._tokens, self._labels, self.device = tokens.to(device), labels.to(device), device

    def __len__(self) -> int:
        return len(self._tokens)

    def draw(self, count: int, seed: int, epoch: int, batch: int) -> Tensor | None:
        return None

    def take(self, index: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._tokens.index_select(0, index), self._labels.index_select(0, index)


@dataclass(frozen=True, eq=False)
class SentenceData:
    """Labelled texts in memory, as tokens.

    Raises:
        ValueError: If the fields do not fit together.

    """

    name: str
    """The name that messages use."""
    train_tokens: Tensor
    """Training tokens, int64 of shape (samples, seq_len)."""
    train_labels: Tensor
    """One int64 label per training sample."""
    test_tokens: Tensor
    """Test tokens, int64 of shape (samples, seq_len)."""
    test_labels: Tensor
    """One int64 label per test sample."""
    num_classes: int
    """Number of classes. Labels are 0 to `num_classes - 1`."""
    vocabulary: tuple[str, ...]
    """The text of each token."""
    class_names: tuple[str, ...] = ()
    """Name of each class; empty if the source has no names."""

    def __post_init__(self) -> None:
        for split, tokens, labels in (
            ("train", self.train_tokens, self.train_labels),
            ("test", self.test_tokens, self.test_labels),
        ):
            where = f"{self.name}: {split} split"
            if tokens.dtype != torch.int64 or tokens.ndim != 2 or tokens.numel() == 0:
                raise ValueError(
                    f"{where}: tokens are {tokens.dtype} of shape {tuple(tokens.shape)}: "
                    "give int64, one row per sentence"
                )
            if labels.dtype != torch.int64 or labels.shape != tokens.shape[:1]:
                raise ValueError(
                    f"{where}: labels are {labels.dtype} of shape {tuple(labels.shape)} for {len(tokens)} sentences: "
                    "give one int64 label per sentence"
                )
            _check_range(f"{where}: token", tokens, len(self.vocabulary))
            _check_range(f"{where}: label", labels, self.num_classes)
        if self.train_tokens.shape[1] != self.test_tokens.shape[1]:
            raise ValueError(
                f"{self.name}: train sentences have {self.train_tokens.shape[1]} tokens, but test sentences "
                f"{self.test_tokens.shape[1]}: make them equal"
            )

    @property
    def unit(self) -> str:
        return "sentences"

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "vocab_size": len(self.vocabulary),
            "seq_len": self.train_tokens.shape[1],
            "num_classes": self.num_classes,
            "pad": PAD,
        }

    def split(self, name: SplitName, *, augment: bool, device: torch.device, dtype: torch.dtype) -> SentenceSplit:
        """Move one split to a device.

        Args:
            name: `"train"` or `"test"`.
            augment: Randomly crop and flip images, or shift windows of text.
            device: Device of the split.
            dtype: Floating-point type of images. Tokens are always int64.

        Returns:
            The split.
        """
        if name == "train":
            return SentenceSplit(self.train_tokens, self.train_labels, device)
        return SentenceSplit(self.test_tokens, self.test_labels, device)


def read_sentences(
    folder: Path,
    seq_len: int | None = None,
    vocab_size: int | None = None,
    entries: Sequence[str] = (),
    test_only: bool = False,
) -> SentenceData | None:
    """Read the labelled texts in a folder (see `read_labelled_texts`); None if there are none.

    `entries` is an existing vocabulary to use; by default, the vocabulary is built from the training texts.
    """
    splits = read_labelled_texts(folder, test_only)
    if splits is None:
        return None
    train, test = splits
    seq_len = DEFAULT_SEQ_LEN if seq_len is None else seq_len
    if seq_len < 2:
        raise ValueError(f"--seq-len is {seq_len}: give 2 or more, because the first token is <s>")
    highest = max(max(train.labels), max(test.labels))
    if highest >= len(train.labels) and train is not test:
        raise ValueError(
            f"{folder}: label {highest} with {len(train.labels)} training sentences: number the classes from 0"
        )
    if entries:
        vocabulary = Vocabulary(entries)
    else:
        vocabulary = Vocabulary.from_texts(train.texts, DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size)

    def tensors(split: LabelledTexts) -> tuple[Tensor, Tensor]:
        tokens = torch.tensor([vocabulary.encode(text, seq_len) for text in split.texts], device="cpu")
        return tokens, torch.tensor(split.labels, device="cpu")

    classes = len(train.class_names) or highest + 1
    name = folder.resolve().name
    return SentenceData(name, *tensors(train), *tensors(test), classes, vocabulary.entries, train.class_names)


def _check_range(what: str, values: Tensor, end: int) -> None:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= end:
        raise ValueError(f"{what} {low if low < 0 else high} is outside 0..{end - 1}: use a labelled split")
