"""Messages between ranks through gloo, from and to host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from petra.distributed.host_message import HostMessage, ReceivedMessage, ScatteredMessage
from petra.distributed.io_thread import Task
from petra.distributed.message_buffers import MessageBuffers, SendBuffers
from petra.distributed.process_groups import ProcessGroups, close_group
from petra.distributed.transport import PendingReceive, Request
from petra.pipeline.message_layout import MessageLayout, PackedMessage, Template
from petra.schedule import Action


class HostChannels:
    """Messages that pass through host memory, whatever the device of the network.

    Each message has a header, and each channel has a thread at both ends, which computes checksums and copies while the
    rank computes. Messages are received into buffers that are reused when no tensor refers to them any more.

    Args:
        groups: The process groups.
        device: The device of the network.
        verify: Whether messages carry a checksum.
    """

    def __init__(self, groups: ProcessGroups, device: torch.device, verify: bool) -> None:
        self._groups, self._device, self._verify = groups, device, verify
        self._buffers = MessageBuffers()
        self._send_buffers = SendBuffers(pinned=device.type == "cuda")

    def send(self, to: int, action: Action, layout: MessageLayout, tensors: Template) -> Callable[[], None]:
        """Send a message.

        Args:
            to: The receiving rank.
            action: The action that the message results from.
            layout: The layout of the content.
            tensors: The content.

        Returns:
            A function that waits until the message has left.
        """
        if self._device.type != "cpu":
            return self.send_packed(to, action, layout.pack(tensors))
        sent = [(weakref.ref(t), _version(t)) for t in tensors if t is not None]

        def check() -> None:
            alive = ((t, version) for tensor, version in sent if (t := tensor()) is not None)
            if any(_version(t) != version for t, version in alive):
                raise RuntimeError(
                    f"{self._groups.position}: a tensor was modified while it was being sent to rank {to}: "
                    "layers must not write into their inputs or outputs"
                )

        if len(layout.parts) > 1:
            return self._send(to, action, ScatteredMessage(layout, tensors), _nothing, check)
        message = self._send_buffers.take(layout)

        def copy() -> None:  # after this, nothing keeps the tensors
            layout.fill(message.memory, tensors)
            check()

        def left() -> None:
            self._send_buffers.give_back(message)
            check()  # of tensors that still exist: the version of a tensor changes after the write

        return self._send(to, action, message, copy, left)

    def send_packed(self, to: int, action: Action, message: PackedMessage) -> Callable[[], None]:
        """Send a message whose memory may be overwritten after the call.

        Args:
            to: The receiving rank.
            action: The action that the message results from.
            message: The content.

        Returns:
            A function that waits until the message has left.
        """
        layout, memory = message
        copied = self._send_buffers.take(layout)
        copied.memory.copy_(memory, non_blocking=True)
        ready = _nothing
        if memory.is_cuda:
            if copied.copied is None:
                copied.copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # no processor time
            copied.copied.record(torch.cuda.current_stream(self._device))
            ready = copied.copied.synchronize
        return self._send(to, action, copied, ready, partial(self._send_buffers.give_back, copied))

    def _send(
        self,
        to: int,
        action: Action,
        message: HostMessage | ScatteredMessage,
        prepare: Callable[[], object],
        left: Callable[[], None],
    ) -> Callable[[], None]:
        """Let a thread send a message.

        Args:
            to: The receiving rank.
            action: The action that the message results from.
            message: The message without its header.
            prepare: Called by the thread; waits until the message has its values.
            left: Called when the message has left.

        Returns:
            A function that waits until the message has left.
        """

        def deliver() -> Callable[[], None]:
            prepare()
            message.seal(action, self._verify)
            return self._groups.post_send(to, message.pieces)

        posted = self._groups.thread(f"to {to}").submit(deliver)

        def wait() -> None:
            posted.result()()
            left()

        return wait

    def begin_waits(self, sends: Sequence[tuple[int, Callable[[], None]]]) -> list[tuple[int, Callable[[], None]]]:
        """Let a thread wait until messages have left.

        Args:
            sends: Receiving ranks, and functions that `send` or `send_packed` returned.

        Returns:
            Receiving ranks, and functions that wait for the thread.
        """
        thread = self._groups.thread("sent")
        return [(to, partial(self._groups.wait_for, thread.submit(wait))) for to, wait in sends]

    def receive_all(self, requests: Sequence[Request]) -> list[PendingReceive]:
        """Post several receives.

        Args:
            requests: Sending rank, action and layout of each of them.

        Returns:
            The messages, to wait for.
        """
        thread = self._groups.thread("post")
        found: list[PendingReceive] = []
        posts: list[Callable[[], None]] = []
        for source, action, layout in requests:
            arrival, post = self._prepare_receive(source, action, layout)
            found.append(ReceivedMessage(partial(self._wait_for_message, source, arrival), self._device))
            posts.append(post)
        if posts:
            # Gloo sends a message only after the receive has been posted. A separate thread posts receives while others
            # wait for earlier messages, so that slow links carry several messages at the same time.
            thread.submit(lambda: [post() for post in posts])
        return found

    def _prepare_receive(
        self, source: int, action: Action, layout: MessageLayout
    ) -> tuple[Task[HostMessage], Callable[[], None]]:
        """Return a message that will arrive, and a function that posts its receive."""
        waits = self._groups.thread(f"from {source}")
        arrival: Task[HostMessage] = Task()

        def post() -> None:
            try:
                message = HostMessage(layout, self._host_memory(layout.size))
                wait = self._groups.post_receive(source, message.pieces)
            except BaseException as error:
                arrival.fail(error)
                return

            def arrive() -> HostMessage:
                wait()
                message.check(action, self._verify)
                return message

            arrival.begin_with(arrive)
            waits.queue(arrival)

        return arrival, post

    def _wait_for_message(self, source: int, arrival: Task[HostMessage]) -> HostMessage:
        with self._groups.activity.waiting(source):
            return self._groups.wait_for(arrival)

    def _host_memory(self, size: int) -> Tensor:
        """Return memory for a message; PyTorch reuses pinned memory when copies from it are done."""
        if self._device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._buffers.empty(size)

    def release_buffers(self) -> None:
        """Give the memory of messages that nothing uses any more back to the allocator."""
        self._buffers = MessageBuffers()
        self._send_buffers.clear()

    def close(self) -> None:
        """Close connections where a thread waits for a message that will never come."""
        self._groups.close_threads("post")  # it gives work to the threads that receive
        if self._groups.interrupted:
            self.release_buffers()  # a thread that is left behind would keep them
        for (source, to), group in self._groups.pairs.items():
            if to == self._groups.position.rank and self._groups.busy(f"from {source}"):
                close_group(group)


def _version(tensor: Tensor) -> int:
    """Return the version counter, which increases with every write into the tensor."""
    return 0 if tensor.is_inference() else tensor._version


def _nothing() -> None:
    pass
