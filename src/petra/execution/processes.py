"""Ranks as processes: torch.distributed, gloo on CPU and NCCL on GPU."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from petra.execution.envelope import Envelope, Template
from petra.execution.transport import Arrival, Place, Transport, buckets, flat, spread
from petra.schedule import Action

Bytes = Tensor


class LostRank(RuntimeError):
    """A message did not come or could not be sent: the rank at the other end is gone or stuck."""


class ProcessTransport(Transport):
    """The ranks of the process group that is there, as ``replicas`` pipelines side by side.

    Two ranks that exchange messages have a group of their own for each direction. Order is all that matches a message
    with its receiver, because NCCL knows no tags; and a group for each direction keeps the two from blocking
    each other. Messages travel as single blocks of bytes from buffer to buffer; buffers are used again and
    again. With gloo they lie in the memory of the host, whatever the device of the network.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        replicas: int = 1,
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        world = dist.get_world_size()
        if replicas < 1 or world % replicas:
            raise ValueError(f"replicas is {replicas}, which does not divide the {world} processes: give one that does")
        shape = (world // replicas, replicas)
        nccl = torch.device(device).type == "cuda" and "nccl" in dist.get_backend_config()
        mesh = init_device_mesh("cuda" if nccl else "cpu", shape, mesh_dim_names=("pipeline", "data"))
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        super().__init__(Place(coordinate[0], shape[0], coordinate[1], shape[1]), device)
        self._buffers_on = torch.device(device if nccl else "cpu")
        self._data = mesh.get_group("data")
        self._timeout = timeout
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._all = dist.new_group(timeout=timeout, backend="gloo")
        self._questions = dist.new_group(timeout=timeout, backend="gloo")
        self._free: dict[int, list[Bytes]] = defaultdict(list)  # by size
        self._leaving: deque[list[tuple[int, dist.Work, Bytes]]] = deque([[]])  # of a turn: receiver and buffer
        self._asked: deque[tuple[dist.Work, Tensor]] = deque()

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        replicas = self.place.replicas
        for source, to in sorted(set(pairs) - set(self._groups)):
            for replica in range(replicas):  # every process has to make every group, in the same order
                members = sorted((source * replicas + replica, to * replicas + replica))
                group = dist.new_group(members, timeout=self._timeout)
                if replica == self.place.replica:
                    self._groups[source, to] = group

    def send(self, to: int, label: Action, tensors: Template) -> None:
        envelope = Envelope.like(tensors)
        buffer = self._buffer(envelope.size)
        envelope.pack(tensors, buffer, label)
        self.sent[to, label.kind.value] += envelope.payload
        self._post(to, buffer)

    def _post(self, to: int, buffer: Bytes) -> None:
        with self._connected(to, "send to"):
            work = dist.isend(buffer, self._process(to), group=self._groups[self.place.rank, to])
        assert work is not None
        self._leaving[-1].append((to, work, buffer))

    def receive(self, source: int, label: Action, template: Template) -> Arrival:
        envelope = Envelope.like(template)
        buffer = self._buffer(envelope.size)
        with self._connected(source, "hear from"):
            work = dist.irecv(buffer, self._process(source), group=self._groups[source, self.place.rank])

        def arrive() -> Template:
            assert work is not None
            with self.doing.waiting(source), self._connected(source, "hear from"):
                work.wait()
            tensors = envelope.unpack(buffer, self.device, label)
            self._free[buffer.numel()].append(buffer)
            return tensors

        return arrive

    def turn(self) -> None:
        # A neighbour makes room for the messages of a tick before it does anything of that tick, so those of the
        # tick before last have somewhere to go, and waiting for them never blocks two ranks on each other.
        self._leaving.append([])
        while len(self._leaving) > 2:
            self._wait_for(self._leaving.popleft())

    def flush(self) -> None:
        while self._leaving:
            self._wait_for(self._leaving.popleft())
        self._leaving.append([])

    def _wait_for(self, leaving: list[tuple[int, dist.Work, Bytes]]) -> None:
        for to, work, buffer in leaving:
            with self.doing.waiting(to), self._connected(to, "send to"):
                work.wait()
            self._free[buffer.numel()].append(buffer)

    def gather(self, value: Any) -> list[Any]:
        text = json.dumps(value).encode()
        world = dist.get_world_size()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        with self.doing.waiting(None), self._connected(None, "hear from"):
            dist.all_gather(lengths, torch.tensor([len(text)]), group=self._all)
            longest = int(max(lengths))
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
            own = torch.zeros(longest, dtype=torch.uint8)
            own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            dist.all_gather(texts, own, group=self._all)
        return [json.loads(bytes(t[: int(n)].tolist())) for t, n in zip(texts, lengths, strict=True)]

    def average(self, tensors: Sequence[Tensor]) -> None:
        under_way = []
        with self.doing.waiting(None), self._connected(None, "average with"):
            for bucket in buckets(tensors):
                vector = flat(bucket).to(self._buffers_on)
                under_way.append((bucket, vector, dist.all_reduce(vector, group=self._data, async_op=True)))
            for bucket, vector, work in under_way:
                assert work is not None
                work.wait()
                spread(vector.div_(self.place.replicas), bucket)

    def any_soon(self, flag: bool) -> bool:
        # Asked in this tick, heard a few ticks later, when everyone has long answered: nobody waits.
        question = torch.tensor([int(flag)])
        with self.doing.waiting(None), self._connected(None, "hear from"):
            work = dist.all_reduce(question, dist.ReduceOp.MAX, group=self._questions, async_op=True)
            assert work is not None
            self._asked.append((work, question))
            if len(self._asked) <= max(4, self.place.ranks):
                return False
            work, question = self._asked.popleft()
            work.wait()
        return bool(question)

    @contextmanager
    def _connected(self, other: int | None, verb: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch.distributed has no class of its own for lost connections
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            whom = "the others" if other is None else f"rank {other}"
            at = f"{self.place}, tick {self.doing.tick}, {self.doing.what}"
            raise LostRank(f"{at}: cannot {verb} {whom} ({reason})") from error

    def _buffer(self, size: int) -> Bytes:
        free = self._free[size]
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, device=self._buffers_on)

    def _process(self, rank: int) -> int:
        return rank * self.place.replicas + self.place.replica
