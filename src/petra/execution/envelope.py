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


def make_label(sender: Action, tensors: Sequence[Tensor], verify: bool) -> Tensor:
    """The action that a message comes from, and with ``verify`` a checksum of what it carries."""
    return torch.tensor(_entries(sender, tensors, verify))


def check_label(label: Tensor, sender: Action, tensors: Sequence[Tensor], verify: bool) -> None:
    """Raise BadMessage unless ``tensors`` are what ``sender`` has sent."""
    found, expected = label.tolist(), _entries(sender, tensors, verify)
    if found[:3] != expected[:3]:
        raise BadMessage(f"a message of {_described(found)} came in place of that of {_described(expected)}")
    if found != expected:
        raise BadMessage(f"the message of {_described(expected)} was damaged on its way")


def payload(tensors: Sequence[Tensor]) -> int:
    """Bytes of the tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def _entries(sender: Action, tensors: Sequence[Tensor], verify: bool) -> list[int]:
    checksum = 0
    if verify:
        for number, tensor in enumerate(tensors, 1):  # the number, so that two that change places are noticed
            checksum = (checksum + number * _checksum(tensor)) % 2**62
    return [_KINDS.index(sender.kind), sender.stage, sender.microbatch, checksum]


def _checksum(tensor: Tensor) -> int:
    """Changes if a byte does, not if words change places; as fast as memory can be read."""
    data = tensor.reshape(-1)
    if data.storage_offset() * data.element_size() % 8:
        data = data.clone()
    octets = data.view(torch.uint8)
    whole = len(octets) // 8 * 8
    return int(octets[:whole].view(torch.int64).sum()) + int(octets[whole:].sum())


def _described(label: list[int]) -> str:
    kind = _KINDS[label[0]].name.lower() if 0 <= label[0] < len(_KINDS) else "unknown action"
    return f"stage {label[1]}, micro-batch {label[2]}, {kind}"
