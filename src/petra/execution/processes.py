"""Ranks as processes: torch.distributed, gloo on CPU and NCCL on GPU."""

from __future__ import annotations

import atexit
import json
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from petra.errors import first_line
from petra.execution.allocation import keep_freed_memory
from petra.execution.courier import Courier, at_once
from petra.execution.envelope import Template, blank_label, check_label, checksum, make_label, payload
from petra.execution.transport import Arrival, Place, Transport, buckets, copies, flat, spread
from petra.schedule import Action


class Blocks:
    """Memory for messages that is handed out again when nobody holds a tensor in it any more."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # by size

    def empty_like(self, template: Tensor, device: torch.device) -> Tensor:
        """An uninitialised tensor of that shape and dtype."""
        if device.type != "cpu":
            return torch.empty(template.shape, dtype=template.dtype, device=device)  # its allocator does just this
        size = template.numel() * template.element_size()
        if size == 0:
            return torch.empty(template.shape, dtype=template.dtype)
        free = self._free[size]
        block = free.pop() if free else torch.empty(size, dtype=torch.uint8)
        # Tensors in this memory keep the array alive, which torch made for them alone: when it dies, they are gone.
        array = block.numpy()
        weakref.finalize(array, free.append, block).atexit = False
        return torch.from_numpy(array).view(template.dtype).view(template.shape)


class LostRank(RuntimeError):
    """A message did not come or could not be sent: the rank at the other end is gone or stuck."""


class ProcessTransport(Transport):
    """The ranks of the process group that is there, as ``replicas`` pipelines side by side.

    Two ranks that exchange messages have a group of their own for each direction. Order is all that matches a message
    with its receiver, because NCCL knows no tags; and a group for each direction keeps the two from blocking
    each other. Tensors leave from where they are and arrive in buffers that are used again once nobody holds
    what arrived in them. With gloo they travel through the memory of the host, whatever the device of the network.
    With ``verify``, a checksum goes with every message there. Each channel of gloo has a thread at both ends, which
    sums up and copies while the rank computes. ``timeout`` has to be longer than a tick takes.
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
            raise ValueError(f"replicas is {replicas}, which does not divide the {world} processes: give one that does")
        shape = (world // replicas, replicas)
        nccl = torch.device(device).type == "cuda" and "nccl" in dist.get_backend_config()
        mesh = init_device_mesh("cuda" if nccl else "cpu", shape, mesh_dim_names=("pipeline", "data"))
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        super().__init__(Place(coordinate[0], shape[0], coordinate[1], shape[1]), device)
        self._wire = torch.device(device if nccl else "cpu")  # where messages travel
        if self._wire.type == "cpu":
            keep_freed_memory()
        self._labelled = not nccl  # on a GPU, looking at a label would make the host wait
        self._verify = verify
        self._data = mesh.get_group("data")
        self._timeout = timeout
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._all = dist.new_group(timeout=timeout, backend="gloo")
        self._questions = dist.new_group(timeout=timeout, backend="gloo")
        self._blocks = Blocks()
        self._couriers: dict[tuple[str, int], Courier] = {}
        self._leaving: deque[list[tuple[int, Callable[[], None]]]] = deque([[]])  # by turns; calls that wait for them
        _there.add(self)
        self._asked: deque[tuple[dist.Work, Tensor]] = deque()

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        with self._connected(None, "connect to"):
            for source, to in sorted(set(pairs) - set(self._groups)):
                for replica in range(self.place.replicas):  # every process makes every group, in the same order
                    self._open(source, to, replica)
        self.gather(None)  # nobody leaves while another still connects

    def _open(self, source: int, to: int, replica: int) -> None:
        sender, receiver = source * self.place.replicas + replica, to * self.place.replicas + replica
        group = dist.new_group(sorted((sender, receiver)), timeout=self._timeout)
        if replica == self.place.replica:
            self._groups[source, to] = group
        # One number, now: NCCL opens a channel with its first message, and in a tick each of two ranks could wait for
        # the other to begin with another one.
        number = torch.zeros(1, device=self._wire)
        if sender == dist.get_rank():
            dist.send(number, receiver, group=group)
        elif receiver == dist.get_rank():
            dist.recv(number, sender, group=group)

    def send(self, to: int, label: Action, tensors: Template) -> None:
        message = [t.contiguous().to(self._wire) for t in tensors if t is not None]
        self.sent[to, label.kind.value] += payload(message)
        versions = _versions(message)

        def deliver() -> Callable[[], None]:
            tag = [make_label(label, checksum(message) if self._verify else 0)] if self._labelled else []
            return self._post(to, [*tag, *message])

        posted = self._courier("to", to).give(deliver) if self._labelled else at_once(deliver)

        def wait() -> None:
            posted.result()()
            if _versions(message) != versions:
                raise RuntimeError(f"{self.place}: something was written into a tensor while it was sent to rank {to}")

        self._leaving[-1].append((to, wait))

    def _post(self, to: int, message: list[Tensor]) -> Callable[[], None]:
        """Send off the tensors; returns a call that waits until they have left."""
        with self._connected(to, "send to"):
            group = self._groups[self.place.rank, to]
            works = [(dist.isend(tensor, self._process(to), group=group), tensor) for tensor in message]

        def wait() -> None:
            with self._connected(to, "send to"):
                for work, _ in works:  # a tensor has to live as long
                    assert work is not None
                    work.wait()

        return wait

    def receive(self, source: int, label: Action, template: Template) -> Arrival:
        tag = [blank_label()] if self._labelled else []
        message = [self._blocks.empty_like(t, self._wire) for t in template if t is not None]
        group = self._groups[source, self.place.rank]
        with self._connected(source, "hear from"):
            works = [dist.irecv(tensor, self._process(source), group=group) for tensor in [*tag, *message]]

        def fetch() -> int:
            with self._connected(source, "hear from"):
                for work in works:
                    assert work is not None
                    work.wait()
            return checksum(message) if self._labelled and self._verify else 0

        fetched = self._courier("from", source).give(fetch).result if self._labelled else fetch

        def arrive() -> Template:
            with self.doing.waiting(source):
                found = fetched()
            if self._labelled:
                check_label(tag[0], label, found)
            arrived = iter(message)
            return tuple(None if t is None else next(arrived).to(self.device) for t in template)

        return arrive

    def _courier(self, direction: str, other: int) -> Courier:
        if (direction, other) not in self._couriers:
            self._couriers[direction, other] = Courier(f"petra-{direction}-{other}")
        return self._couriers[direction, other]

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

    def _wait_for(self, leaving: list[tuple[int, Callable[[], None]]]) -> None:
        for to, gone in leaving:
            with self.doing.waiting(to):
                gone()

    def abandon(self) -> None:
        """End the couriers, those too that wait for messages which now never come."""
        for (direction, other), courier in self._couriers.items():
            if direction == "from" and courier.busy:
                group = self._groups[other, self.place.rank]
                with suppress(RuntimeError):  # gloo closes a channel on which somebody's patience has ended
                    group.recv([torch.empty(1)], int(other > self.place.rank), 0).wait(timedelta(milliseconds=1))
            courier.end(patience=2.0)

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
                vector = flat(bucket).to(self._wire)
                under_way.append((bucket, vector, dist.all_reduce(vector, group=self._data, async_op=True)))
            for bucket, vector, work in under_way:
                assert work is not None
                work.wait()
                spread(vector.div_(self.place.replicas), bucket)

    def bring(self, source: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rank, last = self.place.rank, self.place.ranks - 1
        # Layers may have made or replaced buffers, of which ranks that do not hold them know nothing.
        kinds = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()]
        kinds = self.gather(kinds)[self._process(source)]
        if rank not in (source, last) or self.place.replica > 0:
            return {}
        empty = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in kinds}
        found = copies(tensors) if rank == source else empty
        for tensor in found.values() if source != last else ():
            message = tensor.view(-1).view(torch.uint8)  # gloo does not know all dtypes
            if rank == source:
                with self.doing.waiting(last), self._connected(last, "send to"):
                    dist.send(message, self._process(last), group=self._all)
            else:
                with self.doing.waiting(source), self._connected(source, "hear from"):
                    dist.recv(message, self._process(source), group=self._all)
        return found if rank == last else {}

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
            reason = first_line(error)
            whom = "the others" if other is None else f"rank {other}"
            at = f"{self.place}, tick {self.doing.tick}, {self.doing.what}"
            raise LostRank(f"{at}: cannot {verb} {whom} ({reason})") from error


_there: weakref.WeakSet[ProcessTransport] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """A thread that gloo lets go only while the interpreter ends would end the process with a crash."""
    for transport in list(_there):
        transport.abandon()


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers that grow when something is written into the tensors."""
    return [0 if t.is_inference() else t._version for t in tensors]
