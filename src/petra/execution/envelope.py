"""What goes with every message: which one it is, and a checksum that changes with any byte."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petra.schedule import Action, Kind

Template = tuple[Tensor | None, ...]
"""Tensors of the "meta" device that stand for those of a message; None travels as nothing."""

_KINDS = list(Kind)


class BadMessage(RuntimeError):
    """A message that is not what its sender sent, or not the one that its receiver waits for."""


def blank_label() -> Tensor:
    """Room for a label."""
    return torch.empty(4, dtype=torch.int64)


def make_label(sender: Action, checksum: int = 0) -> Tensor:
    """The action that a message comes from, and the `checksum` of what it carries if there is one."""
    return torch.tensor([_KINDS.index(sender.kind), sender.stage, sender.microbatch, checksum])


def check_label(label: Tensor, sender: Action, checksum: int = 0) -> None:
    """Raise BadMessage unless it is the label that ``sender`` gives to tensors with that checksum."""
    found, expected = label.tolist(), make_label(sender, checksum).tolist()
    if found[:3] != expected[:3]:
        raise BadMessage(f"a message of {_described(found)} came in place of that of {_described(expected)}")
    if found != expected:
        raise BadMessage(f"the message of {_described(expected)} was damaged on its way")


def payload(tensors: Sequence[Tensor]) -> int:
    """Bytes of the tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def checksum(tensors: Sequence[Tensor]) -> int:
    """A number of 64 bits that changes if a byte does, or if two tensors change places, but not if words of one do."""
    # Odd factors lose no bit of a sum.
    total = sum((2 * number + 1) * _sum(tensor) for number, tensor in enumerate(tensors)) % 2**64
    return total - 2**64 if total >= 2**63 else total  # as a label can hold it


def _sum(tensor: Tensor) -> int:
    """Of all words, as fast as memory can be read; on one thread, where torch would take as many as it has."""
    data = tensor.reshape(-1)
    if data.storage_offset() * data.element_size() % 8:
        data = data.clone()
    octets = data.detach().view(torch.uint8).numpy()
    whole = len(octets) // 8 * 8
    return int(octets[:whole].view("int64").sum()) + int(octets[whole:].sum())


def _described(label: list[int]) -> str:
    kind = _KINDS[label[0]].name.lower() if 0 <= label[0] < len(_KINDS) else "unknown action"
    return f"stage {label[1]}, micro-batch {label[2]}, {kind}"
