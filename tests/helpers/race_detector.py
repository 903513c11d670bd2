"""Finds races between the branches of a captured tick, on a CPU, where operations run one after the other.

`RaceRecorder` is `CudaGraphCapture` with streams that keep vector clocks. Every operation has a branch (a "lane") and a
time in it. A lane has seen what it did itself and what was done before it waited. An operation races with another if it
has not seen it and one of the two writes what the other reads or writes; memory is identified by its storage.
"""

from bisect import bisect
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from petra.cudagraph.graph_capture import CudaGraphCapture


class Access(NamedTuple):
    lane: "Lane"
    time: int
    operation: str


class Lane:
    """In place of a CUDA stream."""

    def __init__(self, device=None):
        self.seen = {self: 0}
        self.lent = []  # memory from here that other lanes have used

    def wait_stream(self, other):
        for lane, time in other.seen.items():
            self.seen[lane] = max(time, self.seen.get(lane, 0))

    def has_seen(self, access):
        return self.seen.get(access.lane, 0) >= access.time


class Memory:
    """One storage, and the last that each lane did with it; ``lane`` is None for what was there before."""

    def __init__(self, lane, storage):
        self.lane = lane
        self.alive = StorageWeakRef(storage)  # while there is one, no other storage has this one's number
        self.reads, self.writes = {}, {}


class OperationWatch(TorchDispatchMode):
    """Looks at every operation."""

    def __init__(self, graph_capture):
        super().__init__()
        self.graph_capture = graph_capture
        self.memories = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return outputs  # a view: nothing is read
        name = func._schema.name.removeprefix("aten::")
        self.observe(name, _tensors((args, kwargs)), _tensors(_written(func, args, kwargs or {})), _tensors(outputs))
        return outputs

    def observe(self, name, given, written, outputs):
        lane = self.graph_capture.current
        self.reuse(name, lane)
        lane.seen[lane] += 1
        access = Access(lane, lane.seen[lane], name)
        known = {x.untyped_storage()._cdata for x in given}
        made = {self.memory(x, lane) for x in outputs if x.untyped_storage()._cdata not in known}
        writes = made.union(map(self.memory, written))
        # Of what empty_like, new_zeros and others are given, they look at the shape alone.
        reads = set() if name.endswith("_like") or name.startswith("new_") else set(map(self.memory, given)) - writes
        for memory in reads:
            self.conflicts(access, "reads", "writes", memory.writes)
            memory.reads[lane] = access
        for memory in writes:
            self.conflicts(access, "writes", "reads", memory.reads)
            self.conflicts(access, "writes", "writes", memory.writes)
            memory.writes[lane] = access
        for memory in reads | writes:
            if memory.lane not in (None, lane) and memory not in memory.lane.lent:
                memory.lane.lent.append(memory)

    def memory(self, tensor, lane=None):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.memories:
            self.memories[storage._cdata] = Memory(lane, storage)
        return self.memories[storage._cdata]

    def conflicts(self, access, does, did, others):
        for other in others.values():
            if not access.lane.has_seen(other):
                self.graph_capture.report(f"{self.say(access)} {does} what {self.say(other)} {did}")

    def reuse(self, name, lane):
        """An operation may allocate, if only for itself, and be given what was freed."""
        for memory in [m for m in lane.lent if m.alive.expired()]:
            lane.lent.remove(memory)
            for did, others in (("reads", memory.reads), ("writes", memory.writes)):
                for other in others.values():
                    if not lane.has_seen(other):
                        here = f"{name} in {self.graph_capture.name(lane)}"
                        self.graph_capture.report(f"{here} may be given memory that {self.say(other)} {did}")

    def say(self, access):
        return f"{access.operation} in {self.graph_capture.name(access.lane)}"


class RaceRecorder(CudaGraphCapture):
    """For `TickCapture`. What it records cannot be repeated; `races` says what is wrong with it."""

    def __init__(self):
        self._device, self._streams, self._open = torch.device("cpu"), {}, []
        self.main = self.current = Lane()
        self.races = []
        self.recorded = 0
        self._graphs = []  # from which number on nodes of graphs are of which lane

    def capture(self, work):
        self.recorded += 1
        self._graphs = []
        differentiate = torch.autograd.grad

        def grad(outputs, *args, **kwargs):
            self.look_at_graph(outputs)
            return differentiate(outputs, *args, **kwargs)

        streams = patch.multiple(
            torch.cuda, Stream=Lane, stream=self.stream, current_stream=lambda device=None: self.current
        )
        with streams, patch("torch.autograd.grad", grad), self.stream(self.main), OperationWatch(self):
            work()
        for lane in self._open:
            self.report(f"nobody waits for {self.name(lane)} in the end")
        return self.repeat

    @property
    def lanes(self):
        return set(self._streams)

    def repeat(self):
        raise AssertionError("it was only watched")

    @contextmanager
    def stream(self, lane):
        before = self.current
        self.go_to(lane)
        try:
            yield
        finally:
            self.go_to(before)

    def go_to(self, lane):
        self.current = lane
        self._graphs.append((torch._C._autograd._get_sequence_nr(), lane))

    def look_at_graph(self, outputs):
        """Autograd goes back on the stream of the forward, whoever calls: here that has to be the same."""
        nodes = [y.grad_fn for y in tree_leaves(outputs)]
        seen = set(nodes)
        starts = [start for start, _ in self._graphs]
        while nodes:
            node = nodes.pop()
            if node is None or "AccumulateGrad" in node.name():
                continue
            place = bisect(starts, node._sequence_nr()) - 1
            lane = self._graphs[place][1] if place >= 0 else None
            if lane is not self.current:
                self.report(f"{node.name()} of a graph from {self.name(lane)} goes back in {self.name(self.current)}")
            below = {n for n, _ in node.next_functions} - seen
            seen |= below
            nodes += below

    def report(self, race):
        if race not in self.races:
            self.races.append(race)

    def name(self, lane):
        if lane is None:
            return "before the recording"
        return next((f"lane {number}" for number, known in self._streams.items() if known is lane), "the main lane")


def _tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _written(func, args, kwargs):
    if func is torch.ops.aten.native_batch_norm.default:  # its schema does not tell of running statistics
        return args[3:5]
    said = func._schema.arguments
    given = [*zip(said, args, strict=False), *((a, kwargs[a.name]) for a in said if a.name in kwargs)]
    return [x for argument, x in given if argument.is_write]
