"""What every data set offers, images and text alike: batches and networks need to know no more of it."""

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

SplitName = Literal["train", "test"]


class Split(Protocol):
    """One split of a data set on a device; its samples are asked for by number."""

    def __len__(self) -> int:
        """Number of samples."""

    def draw(self, count: int, seed: int, epoch: int, batch: int) -> Tensor | None:
        """What is random about the samples of that batch: int64 on the CPU, a column a sample; None if nothing is."""

    def take(self, index: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the samples with these numbers, in memory of their own."""


class Data(Protocol):
    """A data set in memory."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def unit(self) -> str:
        """What its samples are, in the plural."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What a network has to know of it, under the names that builders of networks use.

        ``in_channels`` says that inputs are images, ``vocab_size`` that they are tokens; ``num_classes`` that a sample
        has one class for a target, its absence that every token has the next one.
        """

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The text of each token; empty for images, and where tokens are bytes."""

    def split(self, name: SplitName, *, augment: bool, device: torch.device, dtype: torch.dtype) -> Split:
        """One split, moved to ``device``; inputs that are not tokens come in ``dtype``."""
