"""Communication between processes with torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import atexit
import json
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from petra.distributed.device_channels import DeviceChannels
from petra.distributed.host_channels import HostChannels
from petra.distributed.io_thread import Task
from petra.distributed.malloc import keep_freed_memory
from petra.distributed.packed_state import HostMemory
from petra.distributed.process_groups import ProcessGroups, Result, close_group
from petra.distributed.state_exchange import LARGEST, Ring, StateChannel
from petra.distributed.transport import (
    PendingReceive,
    RankPosition,
    Request,
    Transport,
    flatten,
    host_copies,
    make_buckets,
    unflatten_into,
)
from petra.pipeline.message_layout import MessageLayout, PackedMessage, Template, layout_of
from petra.schedule import Action


class ProcessTransport(Transport):
    """Communication with the other processes of the default process group.

    Every pair of ranks that exchanges messages has one process group per direction. NCCL has no tags, so a message is
    matched with its receive by order alone; with separate groups, the two directions cannot block each other. How
    messages are sent depends on the backend: `HostChannels` for gloo, `DeviceChannels` for NCCL.

    Args:
        device: The device of the network.
        replicas: The number of pipelines that the processes form; it must divide the number of processes.
        timeout: How long to wait for a message; must be longer than a tick takes.
        verify: Whether messages over gloo carry a checksum.

    Raises:
        ValueError: If `replicas` does not divide the number of processes.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        replicas: int = 1,
        timeout: timedelta = timedelta(minutes=5),
        verify: bool = True,
    ) -> None:
        world = dist.get_world_size()
        if replicas < 1 or world % replicas:
            raise ValueError(f"replicas is {replicas}, which does not divide the {world} processes: give a divisor")
        shape = (world // replicas, replicas)
        nccl = torch.device(device).type == "cuda" and "nccl" in dist.get_backend_config()
        mesh = init_device_mesh("cuda" if nccl else "cpu", shape, mesh_dim_names=("pipeline", "data"))
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        super().__init__(RankPosition(coordinate[0], shape[0], coordinate[1], shape[1]), device)
        self._comm_device = torch.device(device if nccl else "cpu")
        if self._comm_device.type == "cpu":
            keep_freed_memory()
        self.groups = ProcessGroups(mesh, self.position, self.activity, timeout)
        self._world_group = self.groups.open(backend="gloo")
        self._flags_group = self.groups.open(backend="gloo")
        self._channels: HostChannels | DeviceChannels = (
            DeviceChannels(self.groups, self._comm_device) if nccl else HostChannels(self.groups, self.device, verify)
        )
        # For each recent tick: receiving ranks, and functions that wait until the message has left.
        self._pending_sends: deque[list[tuple[int, Callable[[], None]]]] = deque([[]])
        # The same for earlier ticks: a thread waits for their messages.
        self._leaving: deque[list[tuple[int, Callable[[], None]]]] = deque()
        _transports.add(self)
        self.latency = max(4, shape[0])

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        with self.groups.named(None, "connect to"):
            self.groups.connect(pairs, self._comm_device)
        self.gather(None)  # no process may exit while another one still connects

    def interrupt(self) -> None:
        """Make all communication of this process fail from now on, also where it waits for it."""
        self.groups.interrupt()

    def wait_for(self, task: Task[Result]) -> Result:
        """Wait for a task that communicates, until it has finished or the transport is interrupted.

        Args:
            task: The task of a thread.

        Returns:
            Its result.

        Raises:
            LostRank: If the transport is interrupted before the task has finished.
        """
        return self.groups.wait_for(task)

    def send(self, to: int, action: Action, tensors: Template) -> None:
        layout = layout_of(tensors)
        self.sent[to, action.kind.value] += layout.payload
        self._pending_sends[-1].append((to, self._channels.send(to, action, layout, tensors)))

    def send_packed(self, to: int, action: Action, message: PackedMessage) -> None:
        self.sent[to, action.kind.value] += message.layout.payload
        self._pending_sends[-1].append((to, self._channels.send_packed(to, action, message)))

    def receive(self, source: int, action: Action, layout: MessageLayout) -> PendingReceive:
        return self.receive_all([(source, action, layout)])[0]

    def receive_all(self, requests: Sequence[Request]) -> list[PendingReceive]:
        return self._channels.receive_all(requests)

    def begin_tick(self) -> None:
        # A rank requests all receives of a tick before its first action; with gloo, a thread posts them in order. So
        # the messages of earlier ticks are received, and waiting for them cannot deadlock two ranks.
        self._pending_sends.append([])
        while len(self._pending_sends) > max(1, self.max_unsent_ticks - 1):
            self._hand_over()  # a tick early, so that the rank rarely waits for the thread
        while len(self._leaving) + len(self._pending_sends) > self.max_unsent_ticks:
            self._wait_for_sends()

    def flush(self) -> None:
        while self._pending_sends:
            self._hand_over()
        self._pending_sends.append([])
        while self._leaving:
            self._wait_for_sends()

    def _hand_over(self) -> None:
        """With gloo, let a thread wait for the messages of the oldest tick."""
        self._leaving.append(self._channels.begin_waits(self._pending_sends.popleft()))

    def _wait_for_sends(self) -> None:
        for to, wait in self._leaving.popleft():
            with self.activity.waiting(to):
                wait()

    def release_buffers(self) -> None:
        """Give the memory of messages that nothing uses any more back to the allocator."""
        self._channels.release_buffers()

    def close_threads(self) -> None:
        """End the I/O threads. Those that wait for messages which will never come are left behind."""
        self._channels.close()
        if self.groups.busy("with others") or self.groups.busy("sent"):
            self.groups.interrupt()
        self.groups.close_threads()

    def gather(self, value: Any) -> list[Any]:
        text = json.dumps(value).encode()
        world = dist.get_world_size()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]

        def exchange() -> list[Tensor]:
            dist.all_gather(lengths, torch.tensor([len(text)]), group=self._world_group)
            longest = int(max(lengths))
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
            own = torch.zeros(longest, dtype=torch.uint8)
            own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            dist.all_gather(texts, own, group=self._world_group)
            return texts

        with self.activity.waiting(None), self.groups.named(None, "receive from"):
            texts = self.groups.on_thread(exchange)
        return [json.loads(bytes(t[: int(n)].tolist())) for t, n in zip(texts, lengths, strict=True)]

    def average(self, tensors: Sequence[Tensor]) -> None:
        pending = []
        with self.activity.waiting(None), self.groups.named(None, "average with"):
            for bucket in make_buckets(tensors):
                vector = flatten(bucket).to(self._comm_device)
                pending.append((bucket, vector, dist.all_reduce(vector, group=self.groups.replicas, async_op=True)))
            for bucket, vector, work in pending:
                assert work is not None
                if self._comm_device.type == "cpu":
                    self.groups.on_thread(work.wait)
                else:
                    work.wait()  # the current stream waits, not the host
                unflatten_into(vector.div_(self.position.replicas), bucket)

    def gather_to_main(self, source: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rank, last = self.position.rank, self.position.ranks - 1
        # Layers may create or replace buffers, so only the rank that holds them knows their shapes.
        specs = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()]
        specs = self.gather(specs)[self._process(source)]
        if rank not in (source, last) or self.position.replica > 0:
            return {}
        empty = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in specs}
        result = host_copies(tensors) if rank == source else empty
        for tensor in result.values() if source != last else ():
            message = tensor.view(-1).view(torch.uint8)  # gloo does not support all dtypes
            if rank == source:
                with self.activity.waiting(last), self.groups.named(last, "send to"):
                    self.groups.on_thread(partial(dist.send, message, self._process(last), self._world_group))
            else:
                with self.activity.waiting(source), self.groups.named(source, "receive from"):
                    self.groups.on_thread(partial(dist.recv, message, self._process(source), self._world_group))
        return result if rank == last else {}

    def open_ring(self, to: tuple[int, int], source: tuple[int, int]) -> Ring:
        """Open channels for states. All processes call it.

        Args:
            to: Rank and replica of the process to send to.
            source: Rank and replica of the process to receive from.

        Returns:
            The channels.
        """
        with self.groups.named(None, "connect to"):
            group = self.groups.open(backend="gloo")
        sends = self._state_channel(group, self._number(*to), None)
        receives = self._state_channel(group, None, self._number(*source))
        return Ring(sends, receives, partial(close_group, group))

    def move_state(self, state: Any, source: int, to: int) -> Any:
        process = dist.get_rank()
        with self.activity.waiting(None):
            if process == source:
                self.groups.on_thread(partial(self._state_channel(self._world_group, to, None).send, state))
            elif process == to:
                channel = self._state_channel(self._world_group, None, source)
                return self.groups.on_thread(partial(channel.receive, [HostMemory() for _ in range(LARGEST)]))
        return None

    def _state_channel(self, group: dist.ProcessGroup, to: int | None, source: int | None) -> StateChannel:
        def transfer(tensor: Tensor) -> None:
            if to is not None:
                with self.groups.named(to, "send a snapshot to"):
                    dist.send(tensor, to, group=group)
            elif source is not None:
                with self.groups.named(source, "receive a snapshot from"):
                    dist.recv(tensor, source, group=group)

        return StateChannel(transfer)

    def _number(self, rank: int, replica: int) -> int:
        """Return the number of the process at a position."""
        return rank * self.position.replicas + replica

    def maximum_async(self, values: Sequence[float]) -> Callable[[], list[float]]:
        combined = torch.tensor(values, dtype=torch.float64)
        with self.activity.waiting(None), self.groups.named(None, "receive from"):
            work = dist.all_reduce(combined, dist.ReduceOp.MAX, group=self._flags_group, async_op=True)
        assert work is not None

        def finish() -> list[float]:
            with self.activity.waiting(None), self.groups.named(None, "receive from"):
                self.groups.on_thread(work.wait)
            return combined.tolist()

        return finish


_transports: weakref.WeakSet[ProcessTransport] = weakref.WeakSet()


@atexit.register
def _close_all_threads() -> None:
    # A thread that returns from gloo while the interpreter shuts down would crash the process.
    for transport in list(_transports):
        transport.close_threads()
