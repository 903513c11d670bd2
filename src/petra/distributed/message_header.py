"""The header of a message: the action that sent it, and a checksum of its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petra.schedule import Action, Kind

_KINDS = list(Kind)


class BadMessage(RuntimeError):
    """A message was corrupted, or is not the one that its receiver expects."""


def empty_header() -> Tensor:
    """Return a buffer that a header can be received in."""
    return torch.empty(4, dtype=torch.int64)


def make_header(sender: Action, checksum: int = 0) -> Tensor:
    """Return a header with the action that sends a message, and the `checksum` of its tensors or 0."""
    return torch.tensor([_KINDS.index(sender.kind), sender.stage, sender.microbatch, checksum])


def check_header(header: Tensor, sender: Action, checksum: int = 0) -> None:
    """Raise `BadMessage` unless the header is the one that `make_header` returns for the same arguments."""
    received, expected = header.tolist(), make_header(sender, checksum).tolist()
    if received[:3] != expected[:3]:
        raise BadMessage(f"received the message of {_describe(received)} instead of that of {_describe(expected)}")
    if received != expected:
        raise BadMessage(f"the message of {_describe(expected)} was corrupted in transit")


def payload(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return a 64-bit checksum that detects changed bytes and swapped tensors, but not swapped words of one tensor."""
    # Multiplication by an odd number is invertible modulo 2^64, so it loses no bit of a sum.
    total = sum((2 * number + 1) * _sum_words(tensor) for number, tensor in enumerate(tensors)) % 2**64
    return total - 2**64 if total >= 2**63 else total  # int64, as in a header


def _sum_words(tensor: Tensor) -> int:
    """Sum all 64-bit words at the speed of memory; in NumPy, because PyTorch would use several threads."""
    data = tensor.reshape(-1)
    if data.storage_offset() * data.element_size() % 8:
        data = data.clone()
    octets = data.detach().view(torch.uint8).numpy()
    aligned = len(octets) // 8 * 8
    return int(octets[:aligned].view("int64").sum()) + int(octets[aligned:].sum())


def _describe(header: list[int]) -> str:
    kind = _KINDS[header[0]].name.lower() if 0 <= header[0] < len(_KINDS) else "unknown action"
    return f"stage {header[1]}, micro-batch {header[2]}, {kind}"
