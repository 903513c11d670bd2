"""Messages in host memory: the action that sent it, a checksum and the tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from petra.pipeline.message_layout import HEADER_BYTES, MessageLayout, Template
from petra.schedule import Action, Kind

_KINDS = list(Kind)


class BadMessage(RuntimeError):
    """A message was corrupted, or is not the one that its receiver expects."""


class HostMessage:
    """A message in one vector of bytes in host memory.

    Args:
        layout: The layout of its tensors.
        memory: The vector of bytes.
    """

    def __init__(self, layout: MessageLayout, memory: Tensor) -> None:
        self.layout, self.memory = layout, memory
        self._words: np.ndarray[tuple[int], np.dtype[np.int64]] = memory.numpy().view(np.int64)
        self.copied: torch.cuda.Event | None = None
        """Recorded after the copy from the device, where there is one."""

    @property
    def pieces(self) -> list[Tensor]:
        """The parts of the memory that are sent or received separately."""
        return [self.memory[begin:end] for begin, end in self.layout.parts]

    def seal(self, sender: Action, verify: bool = True) -> None:
        """Write the header.

        Args:
            sender: The action that sends the message.
            verify: Whether it has a checksum.
        """
        self._words[:4] = self._expected(sender, verify)

    def check(self, sender: Action, verify: bool = True) -> None:
        """Check the header.

        Args:
            sender: The action that should have sent the message.
            verify: Whether it has a checksum.

        Raises:
            BadMessage: If the header is not the one that `seal` writes with the same arguments.
        """
        received, expected = self._words[:4].tolist(), self._expected(sender, verify)
        if received[:3] != expected[:3]:
            raise BadMessage(f"received the message of {_describe(received)} instead of that of {_describe(expected)}")
        if received != expected:
            raise BadMessage(f"the message of {_describe(expected)} was corrupted in transit")

    def _expected(self, sender: Action, verify: bool) -> list[int]:
        return _header(sender, self.layout.checksum(self._words) if verify else 0)


class ScatteredMessage:
    """A message that is sent from where its tensors are, in as many parts as its layout has.

    Args:
        layout: The layout of its tensors.
        tensors: The tensors, in host memory.
    """

    def __init__(self, layout: MessageLayout, tensors: Template) -> None:
        self.layout = layout
        self._header = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu")
        full = (t.detach().contiguous() for t in tensors if t is not None and t.numel())
        self._contents = [t.view(-1).view(torch.uint8) for t in full]

    @property
    def pieces(self) -> list[Tensor]:
        """The header and the tensors, which are sent separately."""
        return [self._header, *self._contents]

    def seal(self, sender: Action, verify: bool = True) -> None:
        """Write the header.

        Args:
            sender: The action that sends the message.
            verify: Whether it has a checksum.
        """
        found = self.layout.checksum_of(x.numpy() for x in self._contents) if verify else 0
        self._header.numpy().view(np.int64)[:4] = _header(sender, found)


class ReceivedMessage:
    """A message that arrives in host memory.

    Args:
        fetch: Waits for the message; called once.
        device: The device of its tensors.
    """

    def __init__(self, fetch: Callable[[], HostMessage], device: torch.device) -> None:
        self._fetch, self._device = fetch, device

    def __call__(self) -> Template:
        """Wait for the message; return its tensors on the device."""
        message = self._fetch()
        # PyTorch does not reuse pinned memory before the copies out of it are done.
        return message.layout.views(message.memory.to(self._device, non_blocking=True))

    def copy_into(self, memory: Tensor) -> None:
        """Wait for the message, and copy its bytes into memory on the device.

        Args:
            memory: A vector of bytes in the layout of the message.
        """
        memory.copy_(self._fetch().memory, non_blocking=True)


def _header(sender: Action, checksum: int) -> list[int]:
    return [_KINDS.index(sender.kind), sender.stage, sender.microbatch, checksum]


def _describe(header: list[int]) -> str:
    kind = _KINDS[header[0]].name.lower() if 0 <= header[0] < len(_KINDS) else "unknown action"
    return f"stage {header[1]}, micro-batch {header[2]}, {kind}"
