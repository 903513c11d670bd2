"""The interface of data sets, their random generators and their fingerprints.

`Batches` and networks use a data set through this interface only, whether it holds images or text.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

SplitName = Literal["train", "test"]


class Split(Protocol):
    """One split of a data set, with samples that are accessed by index."""

    @property
    def device(self) -> torch.device:
        """Device of the indices and random numbers that `take` is given."""

    def __len__(self) -> int:
        """Number of samples."""

    def draw(self, count: int, seed: int, epoch: int, batch: int) -> Tensor | None:
        """Draw the random numbers of one batch.

        Args:
            count: Number of samples in the batch.
            seed: Seed of the training.
            epoch: Index of the epoch.
            batch: Index of the batch in the epoch.

        Returns:
            An int64 tensor on the CPU with one column per sample, or None if nothing about the samples is random.

        """

    def take(self, index: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gather a batch of samples.

        Args:
            index: Indices of the samples, on the split's device.
            drawn: The batch's random numbers from `draw`, on the split's device.

        Returns:
            Inputs and targets on the device of the batches, in newly allocated memory.

        """


class Data(Protocol):
    """A data set in memory or in files."""

    @property
    def name(self) -> str:
        """The name that messages use."""

    @property
    def unit(self) -> str:
        """The plural noun for its samples, such as "images"."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that the data set determines for a network, under the names that the model builders use.

        `in_channels` means that inputs are images, `vocab_size` that they are tokens. With `num_classes`, the target
        of a sample is one class. Without it, the target of every token is the next token.
        """

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The text of each token; empty for images, for tokens that are bytes, and for those of a `tokenizer.json`."""

    def split(self, name: SplitName, *, augment: bool, device: torch.device, dtype: torch.dtype) -> Split:
        """Move one split to a device.

        Args:
            name: `"train"` or `"test"`.
            augment: Randomly crop and flip images, or shift windows of text.
            device: Device of the split.
            dtype: Floating-point type of images. Tokens are always int64.

        Returns:
            The split.

        """


@runtime_checkable
class Hashed(Protocol):
    """A data set that knows the hash of its contents."""

    @property
    def content_hash(self) -> str:
        """Hash of all samples, in hexadecimal."""


def keyed_seed(*key: int | str) -> int:
    """Return a stable 63-bit hash of the key, to seed a generator with.

    Each draw has its own key, so no draw depends on an earlier one. Python's built-in `hash` differs between processes;
    this hash is the same on every machine.
    """
    text = "\0".join(str(part) for part in key)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_generator(*key: int | str) -> torch.Generator:
    """Return a new CPU generator with the seed `keyed_seed(*key)`."""
    return torch.Generator("cpu").manual_seed(keyed_seed(*key))


def fingerprint(data: Data) -> str:
    """Hash a data set, to detect that a resumed run has other data than the run had before.

    Args:
        data: The data set, a dataclass with tensors. The hash of `TokenData` is in its files.

    Returns:
        SHA-256 of all samples and of the vocabulary, in hexadecimal.

    """
    if isinstance(data, Hashed):
        return data.content_hash
    hashed = hashlib.sha256()
    assert is_dataclass(data)
    for field in fields(data):
        value = getattr(data, field.name)
        if isinstance(value, Tensor):
            hashed.update(f"{field.name} {tuple(value.shape)} {value.dtype}".encode())
            hashed.update(value.contiguous().view(torch.uint8).numpy().data)
    hashed.update("\0".join(data.vocabulary).encode())
    return hashed.hexdigest()
