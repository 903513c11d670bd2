"""Host memory of messages, which is used again."""

from __future__ import annotations

import weakref
from collections import defaultdict

import torch
from torch import Tensor

from petra.distributed.host_message import HostMessage
from petra.pipeline.message_layout import MessageLayout


class MessageBuffers:
    """Memory for messages, which is reused as soon as no tensor refers to it."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # by size

    def empty(self, size: int) -> Tensor:
        """Return a vector of bytes without values.

        Args:
            size: The number of bytes, at least 1.

        Returns:
            The vector.
        """
        free = self._free[size]
        try:  # several threads take blocks
            block = free.pop()
        except IndexError:
            block = torch.empty(size, dtype=torch.uint8, device="cpu")
        # Every tensor in this memory keeps the array alive, and nothing else does.
        array = block.numpy()
        weakref.finalize(array, free.append, block).atexit = False
        return torch.from_numpy(array)


class SendBuffers:
    """Messages in host memory that are sent again and again, each with other values.

    The thread that trains takes messages. The thread that waits until they have left gives them back.

    Args:
        pinned: Whether the memory is pinned.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[MessageLayout, list[HostMessage]] = defaultdict(list)

    def take(self, layout: MessageLayout) -> HostMessage:
        """Return a message that nobody sends, without values.

        Args:
            layout: The layout of its tensors.

        Returns:
            The message.
        """
        free = self._free[layout]
        if free:
            return free.pop()
        return HostMessage(layout, torch.empty(layout.size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned))

    def give_back(self, message: HostMessage) -> None:
        """Let a message be used again, which has left."""
        self._free[message.layout].append(message)

    def clear(self) -> None:
        """Give the memory of messages that nobody sends back to the allocator."""
        self._free.clear()
