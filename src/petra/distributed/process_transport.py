"""Communication between processes with torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import atexit
import json
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from petra.distributed.host_message import HostMessage, ReceivedMessage, ScatteredMessage
from petra.distributed.io_thread import IOThread, Task, close_threads
from petra.distributed.malloc import keep_freed_memory
from petra.distributed.message_buffers import MessageBuffers, SendBuffers
from petra.distributed.packed_state import HostMemory
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
from petra.formatting import first_line
from petra.pipeline.message_layout import MessageLayout, PackedMessage, Template, layout_of
from petra.schedule import Action

UNUSED_TAG = 2**30
"""A tag that no message has."""
INTERRUPT_INTERVAL = 0.05
"""Seconds between two checks for an interruption while the rank waits."""
THREADS_LIMIT, INTERRUPTED_LIMIT = 2.0, 0.1
"""Seconds that the I/O threads have to end, at the end of a job and after an interruption."""

Result = TypeVar("Result")


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


class LostRank(RuntimeError):
    """A message could not be sent or received, because the rank at the other end is gone or stuck."""


class ProcessTransport(Transport):
    """Communication with the other processes of the default process group.

    Every pair of ranks that exchanges messages has one process group per direction. NCCL has no tags, so a message is
    matched with its receive by order alone; with separate groups, the two directions cannot block each other. Messages
    are received into buffers that are reused when no tensor refers to them any more.

    With gloo, messages pass through host memory, whatever the device of the network. Each has a header, and each gloo
    channel has a thread at both ends, which computes checksums and copies while the rank computes.

    If a connection is closed while a part of a message has arrived or left, gloo still waits until its timeout. So
    threads wait for gloo, and the rank waits for the threads. When the transport is interrupted, the rank no longer
    waits, and threads that are stuck are left behind.

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
        self._has_headers = not nccl  # reading a header on a GPU would make the host wait
        self._verify = verify
        self._replica_group = mesh.get_group("data")
        self._timeout = timeout
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._interrupted = False
        self.connecting = False
        """True while this process connects to others, which nothing can interrupt."""
        self._opened = [dist.group.WORLD, mesh.get_group("pipeline"), self._replica_group]
        self._world_group = self._new_group(backend="gloo")
        self._flags_group = self._new_group(backend="gloo")
        self._buffers = MessageBuffers()
        self._send_buffers = SendBuffers(pinned=self.device.type == "cuda")
        self._io_threads: dict[tuple[str, int], IOThread] = {}
        # For each recent tick: receiving ranks, and functions that wait until the message has left.
        self._pending_sends: deque[list[tuple[int, Callable[[], None]]]] = deque([[]])
        # The same for the ticks before, for which a thread waits.
        self._leaving: deque[list[tuple[int, Callable[[], None]]]] = deque()
        _transports.add(self)
        self.latency = max(4, shape[0])

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        with self._connected(None, "connect to"):
            for source, to in sorted(set(pairs) - set(self._groups)):
                for replica in range(self.position.replicas):  # every process makes every group, in the same order
                    self._open(source, to, replica)
        self.gather(None)  # no process may exit while another one still connects

    def _open(self, source: int, to: int, replica: int) -> None:
        sender, receiver = source * self.position.replicas + replica, to * self.position.replicas + replica
        group = self._new_group(sorted((sender, receiver)))
        if replica == self.position.replica:
            self._groups[source, to] = group
        # Send one number now. NCCL opens a channel with its first message, and two ranks that open different channels
        # first would wait for each other.
        number = torch.zeros(1, device=self._comm_device)
        if sender == dist.get_rank():
            dist.send(number, receiver, group=group)
        elif receiver == dist.get_rank():
            dist.recv(number, sender, group=group)

    def _new_group(self, processes: list[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
        """Open a process group; all processes call it."""
        if self._interrupted:
            raise self._interruption()
        self.connecting = True
        try:
            group: dist.ProcessGroup = dist.new_group(processes, timeout=self._timeout, backend=backend)
        finally:
            self.connecting = False
        if isinstance(group, dist.ProcessGroup):  # this process is in it
            self._opened.append(group)
        return group

    def interrupt(self) -> None:
        """Make all communication of this process fail from now on, also where the rank waits for it."""
        self._interrupted = True
        for group in self._opened:
            if group is not None:
                _close(group)

    def wait_for(self, task: Task[Result]) -> Result:
        """Wait for a task that communicates, unless the transport is interrupted.

        Args:
            task: The task of a thread.

        Returns:
            Its result.

        Raises:
            LostRank: If the transport is interrupted before the task has finished.
        """
        while not task.wait(INTERRUPT_INTERVAL):
            if self._interrupted:
                raise self._interruption()
        return task.result()

    def _interruption(self) -> LostRank:
        return LostRank(f"{self.position}: another generation of the job has begun")

    def _on_thread(self, communicate: Callable[[], Result]) -> Result:
        """Call a function that waits for gloo in a thread, and wait for its result."""
        return self.wait_for(self._io_thread("with", self.position.rank).submit(communicate))

    def send(self, to: int, action: Action, tensors: Template) -> None:
        layout = layout_of(tensors)
        if self.device.type != "cpu":
            packed = layout.pack(tensors)
            if self._has_headers:
                self.send_packed(to, action, packed)
            else:
                self._send_from_device(to, action, packed)
            return
        sent = [(weakref.ref(t), _version(t)) for t in tensors if t is not None]

        def check() -> None:
            alive = ((t, version) for tensor, version in sent if (t := tensor()) is not None)
            if any(_version(t) != version for t, version in alive):
                raise RuntimeError(
                    f"{self.position}: a tensor was modified while it was being sent to rank {to}: "
                    "layers must not write into their inputs or outputs"
                )

        if len(layout.parts) > 1:
            self._send_from_host(to, action, ScatteredMessage(layout, tensors), _nothing, check)
            return
        message = self._send_buffers.take(layout)

        def copy() -> None:  # after this, nothing keeps the tensors
            layout.fill(message.memory, tensors)
            check()

        def left() -> None:
            self._send_buffers.give_back(message)
            check()  # of tensors that still exist: the version of a tensor changes after the write

        self._send_from_host(to, action, message, copy, left)

    def send_packed(self, to: int, action: Action, message: PackedMessage) -> None:
        layout, memory = message
        if not self._has_headers:
            self._send_from_device(to, action, PackedMessage(layout, memory.clone()))
            return
        copied = self._send_buffers.take(layout)
        copied.memory.copy_(memory, non_blocking=True)
        ready = _nothing
        if memory.is_cuda:
            if copied.copied is None:
                copied.copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # no processor time
            copied.copied.record(torch.cuda.current_stream(self.device))
            ready = copied.copied.synchronize
        self._send_from_host(to, action, copied, ready, partial(self._send_buffers.give_back, copied))

    def _host_memory(self, size: int) -> Tensor:
        """Return memory for a message; PyTorch reuses pinned memory when copies from it are done."""
        if self.device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._buffers.empty(size)

    def _send_from_host(
        self,
        to: int,
        action: Action,
        message: HostMessage | ScatteredMessage,
        prepare: Callable[[], object],
        left: Callable[[], None],
    ) -> None:
        """Let a thread send a message.

        Args:
            to: The receiving rank.
            action: The action that the message results from.
            message: The message without its header.
            prepare: Called by the thread; waits until the message has its values.
            left: Called when the message has left.
        """

        def deliver() -> Callable[[], None]:
            prepare()
            message.seal(action, self._verify)
            return self._post(to, message.pieces)

        posted = self._io_thread("to", to).submit(deliver)

        def wait() -> None:
            posted.result()()
            left()

        self.sent[to, action.kind.value] += message.layout.payload
        self._pending_sends[-1].append((to, wait))

    def _send_from_device(self, to: int, action: Action, message: PackedMessage) -> None:
        """Send a message that nobody overwrites with NCCL."""
        self.sent[to, action.kind.value] += message.layout.payload
        self._pending_sends[-1].append((to, self._post(to, [message.memory])))

    def _post(self, to: int, pieces: list[Tensor]) -> Callable[[], None]:
        """Start sending the bytes of a message, and return a function that waits until they have left."""
        try:
            group = self._groups[self.position.rank, to]
            works = [group.send([piece], int(to > self.position.rank), 0) for piece in pieces]
        except RuntimeError as error:
            raise self._lost(to, "send to", error) from error

        def wait(kept: list[Tensor] = pieces) -> None:  # they must stay alive until then
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self._lost(to, "send to", error) from error

        return wait

    def receive(self, source: int, action: Action, layout: MessageLayout) -> PendingReceive:
        return self.receive_all([(source, action, layout)])[0]

    def receive_all(self, requests: Sequence[Request]) -> list[PendingReceive]:
        if not self._has_headers:
            return [self._receive_on_device(source, layout) for source, _, layout in requests]
        thread = self._io_thread("post", self.position.rank)  # created first, and so closed first
        found: list[PendingReceive] = []
        posts: list[Callable[[], None]] = []
        for source, action, layout in requests:
            arrival, post = self._prepare_receive(source, action, layout)
            found.append(ReceivedMessage(partial(self._wait_for_message, source, arrival), self.device))
            posts.append(post)
        if posts:
            # Gloo sends a message only after the receive has been posted. A separate thread posts receives while others
            # wait for earlier messages, so that slow links carry several messages at the same time.
            thread.submit(lambda: [post() for post in posts])
        return found

    def _receive_on_device(self, source: int, layout: MessageLayout) -> DeviceMessage:
        memory = torch.empty(layout.size, dtype=torch.uint8, device=self._comm_device)
        wait = self._post_receive(source, [memory])

        def arrived() -> Tensor:
            wait()
            return memory

        return DeviceMessage(layout, arrived)

    def _prepare_receive(
        self, source: int, action: Action, layout: MessageLayout
    ) -> tuple[Task[HostMessage], Callable[[], None]]:
        """Return a message that will arrive, and a function that posts its receive."""
        waits = self._io_thread("from", source)
        arrival: Task[HostMessage] = Task()

        def post() -> None:
            try:
                message = HostMessage(layout, self._host_memory(layout.size))
                wait = self._post_receive(source, message.pieces)
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
        with self.activity.waiting(source):
            return self.wait_for(arrival)

    def _post_receive(self, source: int, pieces: list[Tensor]) -> Callable[[], None]:
        """Post the receive of a message, and return a function that waits until it has arrived."""
        try:
            group = self._groups[source, self.position.rank]
            works = [group.recv([piece], int(source > self.position.rank), 0) for piece in pieces]
        except RuntimeError as error:
            raise self._lost(source, "receive from", error) from error

        def wait() -> None:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self._lost(source, "receive from", error) from error

        return wait

    def _io_thread(self, direction: str, other: int) -> IOThread:
        if (direction, other) not in self._io_threads:
            self._io_threads[direction, other] = IOThread(f"petra-{direction}-{other}")
        return self._io_threads[direction, other]

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
        while self._leaving:
            self._wait_for_sends()
        self._pending_sends.append([])

    def _hand_over(self) -> None:
        """Let a thread wait for the messages of the oldest tick."""
        sends = self._pending_sends.popleft()
        if self._has_headers and sends:
            thread = self._io_thread("sent", self.position.rank)
            sends = [(to, partial(self.wait_for, thread.submit(wait))) for to, wait in sends]
        self._leaving.append(sends)

    def _wait_for_sends(self) -> None:
        for to, wait in self._leaving.popleft():
            with self.activity.waiting(to):
                wait()

    def release_buffers(self) -> None:
        """Give the memory of messages that nothing uses any more back to the allocator."""
        self._buffers = MessageBuffers()
        self._send_buffers.clear()

    def close_threads(self) -> None:
        """End the I/O threads. Those that wait for messages which will never come are left behind."""
        for (direction, other), thread in self._io_threads.items():
            if direction == "from" and thread.busy:
                _close(self._groups[other, self.position.rank])
        close_threads(self._io_threads.values(), INTERRUPTED_LIMIT if self._interrupted else THREADS_LIMIT)
        self._io_threads.clear()

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

        with self.activity.waiting(None), self._connected(None, "receive from"):
            texts = self._on_thread(exchange)
        return [json.loads(bytes(t[: int(n)].tolist())) for t, n in zip(texts, lengths, strict=True)]

    def average(self, tensors: Sequence[Tensor]) -> None:
        pending = []
        with self.activity.waiting(None), self._connected(None, "average with"):
            for bucket in make_buckets(tensors):
                vector = flatten(bucket).to(self._comm_device)
                pending.append((bucket, vector, dist.all_reduce(vector, group=self._replica_group, async_op=True)))
            for bucket, vector, work in pending:
                assert work is not None
                if self._has_headers:
                    self._on_thread(work.wait)
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
                with self.activity.waiting(last), self._connected(last, "send to"):
                    self._on_thread(partial(dist.send, message, self._process(last), self._world_group))
            else:
                with self.activity.waiting(source), self._connected(source, "receive from"):
                    self._on_thread(partial(dist.recv, message, self._process(source), self._world_group))
        return result if rank == last else {}

    def open_ring(self, to: tuple[int, int], source: tuple[int, int]) -> Ring:
        """Open channels for states. All processes call it.

        Args:
            to: Rank and replica of the process to send to.
            source: Rank and replica of the process to receive from.

        Returns:
            The channels.
        """
        with self._connected(None, "connect to"):
            group = self._new_group(backend="gloo")
        sends = self._state_channel(group, self._number(*to), None)
        receives = self._state_channel(group, None, self._number(*source))
        return Ring(sends, receives, partial(_close, group))

    def move_state(self, state: Any, source: int, to: int) -> Any:
        process = dist.get_rank()
        with self.activity.waiting(None):
            if process == source:
                self._on_thread(partial(self._state_channel(self._world_group, to, None).send, state))
            elif process == to:
                channel = self._state_channel(self._world_group, None, source)
                return self._on_thread(partial(channel.receive, [HostMemory() for _ in range(LARGEST)]))
        return None

    def _state_channel(self, group: dist.ProcessGroup, to: int | None, source: int | None) -> StateChannel:
        def transfer(tensor: Tensor) -> None:
            if to is not None:
                with self._connected(to, "send a snapshot to"):
                    dist.send(tensor, to, group=group)
            elif source is not None:
                with self._connected(source, "receive a snapshot from"):
                    dist.recv(tensor, source, group=group)

        return StateChannel(transfer)

    def _number(self, rank: int, replica: int) -> int:
        """Return the number of the process at a position."""
        return rank * self.position.replicas + replica

    def maximum_async(self, values: Sequence[float]) -> Callable[[], list[float]]:
        combined = torch.tensor(values, dtype=torch.float64)
        with self.activity.waiting(None), self._connected(None, "receive from"):
            work = dist.all_reduce(combined, dist.ReduceOp.MAX, group=self._flags_group, async_op=True)
        assert work is not None

        def finish() -> list[float]:
            with self.activity.waiting(None), self._connected(None, "receive from"):
                work.wait()
            return combined.tolist()

        return finish

    @contextmanager
    def _connected(self, other: int | None, verb: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._lost(other, verb, error) from error

    def _lost(self, other: int | None, verb: str, error: RuntimeError) -> LostRank:
        """Return an error that says which rank is gone; torch.distributed raises no subclass for lost connections."""
        peer = "the other ranks" if other is None else f"rank {other}"
        where = f"{self.position}, tick {self.activity.tick}, {self.activity.what}"
        return LostRank(f"{where}: cannot {verb} {peer} ({first_line(error)})")


def _close(group: dist.ProcessGroup) -> None:
    """Close the connections of a process group, also where a thread waits for one of them."""
    if "nccl" in group.name():
        group.abort()
    for other in range(group.size()):
        if other == group.rank():
            continue
        try:
            # Gloo closes all connections of a group when one receive times out.
            group.recv([torch.empty(1)], other, UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return
            # This process is gone.


_transports: weakref.WeakSet[ProcessTransport] = weakref.WeakSet()


@atexit.register
def _close_all_threads() -> None:
    # A thread that returns from gloo while the interpreter shuts down would crash the process.
    for transport in list(_transports):
        transport.close_threads()


def _version(tensor: Tensor) -> int:
    """Return the version counter, which increases with every write into the tensor."""
    return 0 if tensor.is_inference() else tensor._version


def _nothing() -> None:
    pass
