"""Messages between ranks through NCCL, from and to memory on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from petra.distributed.process_groups import ProcessGroups
from petra.distributed.transport import PendingReceive, Request
from petra.pipeline.message_layout import MessageLayout, PackedMessage, Template
from petra.schedule import Action


class DeviceMessage:
    """A message that is received into memory on the device.

    Args:
        layout: The layout of its tensors.
        fetch: Waits for it, and returns its bytes; called once.
    """

    def __init__(self, layout: MessageLayout, fetch: Callable[[], Tensor]) -> None:
        self._layout, self._fetch = layout, fetch

    def __call__(self) -> Template:
        """Wait for the message; return its tensors."""
        return self._layout.views(self._fetch())

    def copy_into(self, memory: Tensor) -> None:
        """Wait for the message, and copy its bytes into other memory on the device.

        Args:
            memory: A vector of bytes in the layout of the message.
        """
        memory.copy_(self._fetch())


class DeviceChannels:
    """Messages that a GPU sends and receives.

    They have no header, because reading one would make the host wait. A wait makes the current stream wait, not the
    host.

    Args:
        groups: The process groups.
        device: The device.
    """

    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        self._groups, self._device = groups, device

    def send(self, to: int, action: Action, layout: MessageLayout, tensors: Template) -> Callable[[], None]:
        """Send a message; return a function that waits until it has left."""
        return self._groups.post_send(to, [layout.pack(tensors).memory])

    def send_packed(self, to: int, action: Action, message: PackedMessage) -> Callable[[], None]:
        """Send a message whose memory may be overwritten; return a function that waits until it has left."""
        return self._groups.post_send(to, [message.memory.clone()])

    def receive_all(self, requests: Sequence[Request]) -> list[PendingReceive]:
        """Post several receives."""
        return [self._receive(source, layout) for source, _, layout in requests]

    def _receive(self, source: int, layout: MessageLayout) -> DeviceMessage:
        memory = torch.empty(layout.size, dtype=torch.uint8, device=self._device)
        wait = self._groups.post_receive(source, [memory])

        def arrived() -> Tensor:
            wait()
            return memory

        return DeviceMessage(layout, arrived)

    def begin_waits(self, sends: Sequence[tuple[int, Callable[[], None]]]) -> list[tuple[int, Callable[[], None]]]:
        """Return the given functions: none of them makes the host wait."""
        return list(sends)

    def release_buffers(self) -> None:
        """Do nothing: the allocator of the device has the memory."""

    def close(self) -> None:
        """Do nothing: there are no threads."""
