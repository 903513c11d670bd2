"""A message as one block of bytes: what makes it persistent, countable and checkable."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from petra.schedule import Action, Kind

Template = tuple[Tensor | None, ...]
"""Tensors of the "meta" device that stand for those of a message; None travels as nothing."""

_ALIGNED = 64
_LABEL = 4 * 8  # kind, stage, micro-batch and checksum
_KINDS = list(Kind)


class BadMessage(RuntimeError):
    """A message that is not what its sender sent, or not the one that its receiver waits for."""


@dataclass(frozen=True)
class Envelope:
    """How the tensors of a message lie in a buffer, with a label behind them."""

    parts: tuple[tuple[torch.Size, torch.dtype] | None, ...]

    @classmethod
    def like(cls, tensors: Template) -> Envelope:
        """The envelope of messages with these shapes."""
        return cls(tuple(None if t is None else (t.shape, t.dtype) for t in tensors))

    @property
    def payload(self) -> int:
        """Bytes of the tensors themselves."""
        return sum(_bytes(part) for part in self.parts)

    @property
    def size(self) -> int:
        """Bytes of the whole buffer."""
        return sum(_rounded(_bytes(part)) for part in self.parts) + _LABEL

    def pack(self, tensors: Template, buffer: Tensor, label: Action) -> None:
        """Copy the tensors of the message that ``label`` sends into ``buffer``."""
        for tensor, place in zip(tensors, self._places(buffer), strict=True):
            if tensor is not None and place is not None:
                place.copy_(tensor, non_blocking=True)
        buffer[-_LABEL:].view(torch.int64).copy_(torch.tensor(self._label(label, buffer)))

    def unpack(self, buffer: Tensor, device: torch.device, label: Action) -> Template:
        """Copies of the tensors, once it is certain that the message is whole and the one of ``label``."""
        # On a GPU the look would make the host wait; NCCL checks what it carries.
        if buffer.device.type == "cpu":
            found, expected = buffer[-_LABEL:].view(torch.int64).tolist(), self._label(label, buffer)
            if found[:3] != expected[:3]:
                raise BadMessage(f"a message of {_described(found)} came in place of that of {_described(expected)}")
            if found != expected:
                raise BadMessage(f"the message of {_described(expected)} was damaged on its way")
        places = self._places(buffer)
        return tuple(None if p is None else torch.empty_like(p, device=device).copy_(p) for p in places)

    def _label(self, label: Action, buffer: Tensor) -> list[int]:
        checksum = 0
        if buffer.device.type == "cpu":
            checksum = int(buffer[:-_LABEL].view(torch.int64).sum()) if buffer.numel() > _LABEL else 0
        return [_KINDS.index(label.kind), label.stage, label.microbatch, checksum]

    def _places(self, buffer: Tensor) -> list[Tensor | None]:
        places: list[Tensor | None] = []
        start = 0
        for part in self.parts:
            if part is None:
                places.append(None)
                continue
            shape, dtype = part
            places.append(buffer[start : start + _bytes(part)].view(dtype).view(shape))
            start += _rounded(_bytes(part))
        return places


def _bytes(part: tuple[torch.Size, torch.dtype] | None) -> int:
    return 0 if part is None else prod(part[0]) * part[1].itemsize


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _described(label: list[int]) -> str:
    kind = _KINDS[label[0]].name.lower() if 0 <= label[0] < len(_KINDS) else "unknown action"
    return f"stage {label[1]}, micro-batch {label[2]}, {kind}"
