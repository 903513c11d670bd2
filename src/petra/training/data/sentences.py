"""Texts with a class each, as rows of tokens of one length."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petra.training.data.labelled import Labelled, read_labelled
from petra.training.data.protocol import SplitName
from petra.training.data.vocabulary import PAD, Vocabulary

LENGTH, VOCAB_SIZE = 64, 8192
"""Tokens of a sample and most entries of a vocabulary, unless told otherwise."""


class SentenceSplit:
    """Tokens and labels; nothing about them is random."""

    def __init__(self, tokens: Tensor, labels: Tensor, device: torch.device) -> None:
        self._tokens, self._labels = tokens.to(device), labels.to(device)

    def __len__(self) -> int:
        return len(self._tokens)

    def draw(self, count: int, seed: int, epoch: int, batch: int) -> Tensor | None:
        return None

    def take(self, index: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._tokens.index_select(0, index), self._labels.index_select(0, index)


@dataclass(frozen=True, eq=False)
class SentenceData:
    """Tokens, int64 of shape (samples, length), with int64 labels."""

    name: str
    train_tokens: Tensor
    train_labels: Tensor
    test_tokens: Tensor
    test_labels: Tensor
    num_classes: int
    vocabulary: tuple[str, ...]
    class_names: tuple[str, ...] = ()  # empty when the source does not tell

    def __post_init__(self) -> None:
        for split, tokens, labels in (
            ("train", self.train_tokens, self.train_labels),
            ("test", self.test_tokens, self.test_labels),
        ):
            where = f"{self.name}: {split} split"
            if tokens.dtype != torch.int64 or tokens.ndim != 2 or tokens.numel() == 0:
                raise ValueError(
                    f"{where}: tokens are {tokens.dtype} of shape {tuple(tokens.shape)}: give int64, a row a sentence"
                )
            if labels.dtype != torch.int64 or labels.shape != tokens.shape[:1]:
                raise ValueError(
                    f"{where}: labels are {labels.dtype} of shape {tuple(labels.shape)} for {len(tokens)} sentences: "
                    "give one int64 label a sentence"
                )
            _check_range(f"{where}: token", tokens, len(self.vocabulary))
            _check_range(f"{where}: label", labels, self.num_classes)
        if self.train_tokens.shape[1] != self.test_tokens.shape[1]:
            raise ValueError(
                f"{self.name}: train sentences have {self.train_tokens.shape[1]} tokens but test sentences "
                f"{self.test_tokens.shape[1]}: make them equal"
            )

    @property
    def unit(self) -> str:
        return "sentences"

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "vocab_size": len(self.vocabulary),
            "length": self.train_tokens.shape[1],
            "num_classes": self.num_classes,
            "pad": PAD,
        }

    def split(self, name: SplitName, *, augment: bool, device: torch.device, dtype: torch.dtype) -> SentenceSplit:
        if name == "train":
            return SentenceSplit(self.train_tokens, self.train_labels, device)
        return SentenceSplit(self.test_tokens, self.test_labels, device)


def read_sentences(
    folder: Path,
    length: int | None = None,
    vocab_size: int | None = None,
    entries: Sequence[str] = (),
    test_only: bool = False,
) -> SentenceData | None:
    """The labelled texts in a folder (see `read_labelled`); None when there are none.

    ``entries`` are those of a vocabulary that is there already.
    """
    found = read_labelled(folder, test_only)
    if found is None:
        return None
    train, test = found
    length = LENGTH if length is None else length
    if length < 2:
        raise ValueError(f"--length is {length}: give 2 or more, for the first token stands in front of the text")
    highest = max(max(train.labels), max(test.labels))
    if highest >= len(train.labels) and train is not test:
        raise ValueError(f"{folder}: label {highest} among {len(train.labels)} sentences: number the classes from 0")
    if entries:
        vocabulary = Vocabulary(entries)
    else:
        vocabulary = Vocabulary.of(train.texts, VOCAB_SIZE if vocab_size is None else vocab_size)

    def part(given: Labelled) -> tuple[Tensor, Tensor]:
        tokens = torch.tensor([vocabulary.encode(text, length) for text in given.texts], device="cpu")
        return tokens, torch.tensor(given.labels, device="cpu")

    classes = len(train.class_names) or highest + 1
    name = folder.resolve().name
    return SentenceData(name, *part(train), *part(test), classes, vocabulary.entries, train.class_names)


def _check_range(what: str, values: Tensor, end: int) -> None:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= end:
        raise ValueError(f"{what} {low if low < 0 else high} is outside 0..{end - 1}: use a labelled split")
