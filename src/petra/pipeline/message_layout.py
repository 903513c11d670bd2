"""The layout of a message between ranks: a header and all of its tensors in one vector of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Template = tuple[Tensor | None, ...]
"""Meta tensors with the shapes of a message; None stands for a gradient that does not exist and is not sent."""

ALIGNMENT = 512
"""Tensors begin at multiples of it, as in memory of their own: some kernels are chosen by alignment."""

HEADER_BYTES = ALIGNMENT
"""The bytes before the first tensor. They are there on the device, too, so that one copy moves a message."""

LARGE = 2**21
"""Bytes of tensors from which on they are sent one by one: a copy into one vector would take longer than it saves."""

Specs = tuple[tuple[torch.Size, torch.dtype] | None, ...]
"""Shapes and dtypes of the tensors of a message."""


class MessageLayout:
    """Where each tensor of a message lies. Get it with `layout_of`.

    Args:
        specs: Shapes and dtypes of the tensors.
    """

    def __init__(self, specs: Specs) -> None:
        self.specs = specs
        self.payload = 0
        """The bytes of the tensors."""
        self.size = HEADER_BYTES
        """The bytes of the vector, with the header and the gaps between tensors."""
        self._places: list[tuple[int, int, torch.Size, torch.dtype] | None] = []  # begin and end
        for spec in specs:
            if spec is None:
                self._places.append(None)
                continue
            count = spec[0].numel() * spec[1].itemsize
            self._places.append((self.size, self.size + count, *spec))
            self.payload += count
            self.size += -(-count // ALIGNMENT) * ALIGNMENT
        full = [place[:2] for place in self._places if place is not None and place[0] < place[1]]
        self.parts = [(0, self.size)] if self.payload < LARGE else [(0, HEADER_BYTES), *full]
        """Begin and end of what is sent at a time: the whole message, or the header and each tensor."""
        self._words = np.array([begin // 8 for begin, _ in full], dtype=np.int64)
        # Multiplication by an odd number is invertible modulo 2^64, so it loses no bit of a sum.
        self._factors = 2 * np.arange(len(full), dtype=np.int64) + 1

    def __str__(self) -> str:
        return str([(tuple(spec[0]), spec[1]) for spec in self.specs if spec is not None])

    def views(self, memory: Tensor) -> Template:
        """Return the tensors of a message.

        Args:
            memory: The vector of bytes.

        Returns:
            Tensors in this memory, each with a version counter of its own.
        """
        # PyTorch takes a slice of an array for memory of its own, so nothing more is kept alive or saved with it.
        data = memory.numpy() if memory.device.type == "cpu" else memory
        return tuple(None if place is None else _view(data, memory.device, *place) for place in self._places)

    @torch.no_grad()
    def fill(self, memory: Tensor, tensors: Template) -> None:
        """Copy tensors into a vector of bytes on their device.

        Args:
            memory: The vector.
            tensors: The tensors of a message.
        """
        pairs = zip(self.views(memory), tensors, strict=True)
        copies = [(to, x) for to, x in pairs if to is not None and x is not None and to.numel()]
        if copies:
            torch._foreach_copy_([to for to, _ in copies], [x for _, x in copies])

    def pack(self, tensors: Template) -> PackedMessage:
        """Copy tensors into one new vector of bytes on their device.

        Args:
            tensors: The tensors of a message.

        Returns:
            The message.
        """
        device = next((x.device for x in tensors if x is not None), torch.device("cpu"))
        memory = torch.empty(self.size, dtype=torch.uint8, device=device)
        self.fill(memory, tensors)
        return PackedMessage(self, memory)

    def checksum(self, words: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
        """Return a checksum that detects changed bytes and swapped tensors, but not swapped words of one tensor.

        In NumPy, because PyTorch would use several threads.

        Args:
            words: The vector of bytes as 64-bit words, in host memory.

        Returns:
            A number of 64 bits.
        """
        if len(self.parts) > 1:  # what is between the tensors is not sent
            octets = words.view(np.uint8)
            return self.checksum_of(octets[begin:end] for begin, end in self.parts[1:])
        if not len(self._words):
            return 0
        return int(np.dot(np.add.reduceat(words, self._words), self._factors))

    def checksum_of(self, contents: Iterable[np.ndarray[tuple[int], np.dtype[np.uint8]]]) -> int:
        """Return the checksum of a message that is sent in parts.

        Args:
            contents: The bytes of each tensor with values, in host memory.

        Returns:
            A number of 64 bits.
        """
        return int(np.dot(np.array([_sum(octets) for octets in contents], dtype=np.int64), self._factors))


class PackedMessage(NamedTuple):
    """A message in one vector of bytes."""

    layout: MessageLayout
    memory: Tensor


def layout_of(template: Sequence[Tensor | None]) -> MessageLayout:
    """Return the layout of messages with these shapes and dtypes.

    Args:
        template: Tensors with the shapes and dtypes of the content.

    Returns:
        The layout, the same object for the same shapes and dtypes.
    """
    return _layout(tuple(None if t is None else (t.shape, t.dtype) for t in template))


def payload(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def _sum(octets: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    """Return the sum of all 64-bit words, and of the bytes after the last whole one."""
    words = len(octets) // 8 * 8
    total = int(octets[:words].view(np.int64).sum()) + int(octets[words:].sum())
    return (total + 2**63) % 2**64 - 2**63


@lru_cache(maxsize=1024)
def _layout(specs: Specs) -> MessageLayout:
    return MessageLayout(specs)


def _view(data: Any, device: torch.device, begin: int, end: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a vector of bytes, which is a tensor or an array."""
    if begin == end:
        return torch.empty(shape, dtype=dtype, device=device)
    part = data[begin:end]
    flat = part if isinstance(part, Tensor) else torch.from_numpy(part)
    return flat.view(dtype).view(shape).data
