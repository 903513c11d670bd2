"""Measurements of the ranks: the speed of messages, the costs of stages without neighbours, and real pipelines."""

import statistics
import time
from collections import defaultdict
from itertools import pairwise

import torch
import torch.distributed as dist
from configurations import create

import petra
from petra import METHODS
from petra.measure import nbytes
from petra.methods import BackwardMessage, Settings
from petra.pipeline import MessageFormat, ShapeInference, StageBuilder, partition
from petra.pipeline.message_layout import layout_of
from petra.pipeline.message_shapes import shapes_of
from petra.schedule import Action, Kind
from petra.trainer.loss import cross_entropy

SMALL, LARGE = 2**4, 2**19  # numbers in a message
LABEL = Action(0, Kind.FORWARD, 0)


def sgd(parameters):
    """Return the optimizer of all pipelines; only speed is measured."""
    return torch.optim.SGD(parameters, 1e-4, momentum=0.9)


def link(transport, repeats):
    """Return latency, bytes per second, and the seconds for which a message occupies its sender or its receiver.

    Neighbours send messages to and fro, all pairs at the same time.
    """
    rank, ranks = transport.position.rank, transport.position.ranks
    other = rank ^ 1
    transport.connect([pair for r in range(0, ranks - 1, 2) for pair in ((r, r + 1), (r + 1, r))])
    found, calls = [], []
    for size in (SMALL, LARGE):
        message, seconds = (torch.randn(size),), []
        for _ in range(repeats):
            dist.barrier()
            if other >= ranks:
                continue
            began = time.perf_counter()
            transport.begin_tick()
            arrive = transport.receive(other, LABEL, layout_of(message))
            posted = time.perf_counter() - began
            began = time.perf_counter()
            if rank < other:
                sending = time.perf_counter()
                transport.send(other, LABEL, message)
                calls.append((posted + time.perf_counter() - sending) / 2)
                arrive()
            else:
                arrive()
                transport.send(other, LABEL, message)
            if rank < other:
                seconds.append((time.perf_counter() - began) / 2)
        transport.flush()
        found.append(statistics.median(seconds) if seconds else None)
    gathered = [row for row in transport.gather([*found, calls]) if row[0] is not None]
    small, large = (statistics.median(row[i] for row in gathered) for i in range(2))
    bandwidth = 4 * (LARGE - SMALL) / max(large - small, 1e-9)
    return small, bandwidth, statistics.median(c for row in gathered for c in row[2])


class IsolatedStage:
    """The stage of a rank without neighbours: it gets random messages, and nobody receives what it computes."""

    def __init__(self, configuration, rank, built):
        network, inputs, self._targets, sizes = built
        method = METHODS[configuration.method]
        cuts = partition(len(network), sizes)
        self._shapes = ShapeInference(list(network), cuts, method).shapes(shapes_of((inputs,)))
        builder = StageBuilder(list(network), method, Settings(torch.device("cpu")), loss=cross_entropy, optimizer=sgd)
        self._stage = builder.build(rank, len(cuts), cuts[rank])
        format = MessageFormat()
        self._lay_out = format.lay_out
        template = self._shapes.forward[rank]
        self._inputs = (inputs,) if rank == 0 else tuple(torch.randn(t.shape) for t in template)
        self._rank, self._last = rank, self._stage.last
        self._in_flight = configuration.ranks - 1 - rank
        self._outputs = {}
        self._done = self._returned = 0  # micro-batches
        self.seconds = defaultdict(list)

    def messages(self):
        """Return the bytes that the stage sends forward and backward for a micro-batch."""
        up = self._shapes.forward[self._rank + 1] if not self._last else ()
        down = self._shapes.backward[self._rank - 1] if self._rank else ()
        return [sum(nbytes([t]) for t in message if t is not None) for message in (up, down)]

    def run(self, seconds):
        """Work on whole updates, in the order of 1F1B, for some time; the durations are in `seconds`."""
        for kind in ("forward", "backward", "update"):
            self.seconds[kind].clear()
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop or not self.seconds["update"]:
            for _ in range(self._in_flight):
                self._forward()
            for _ in range(4):
                self._forward()
                self._backward()
            for _ in range(self._in_flight):
                self._backward()
            self._timed("update", self._stage.update)

    def _forward(self):
        number, self._done = self._done, self._done + 1
        inputs = tuple(x.clone() for x in self._inputs)  # every message has its own memory

        def work():
            outputs = self._lay_out(self._stage.forward(number, inputs))
            if self._last:
                self._stage.compute_loss(number, outputs, self._targets)
            return outputs

        self._outputs[number] = self._timed("forward", work)

    def _backward(self):
        number, self._returned = self._returned, self._returned + 1
        outputs = self._outputs.pop(number)
        message = None
        if not self._last:
            streams = tuple(x.clone() for x in outputs) if self._stage.needs_outputs else None
            message = BackwardMessage(streams, tuple(torch.full_like(x, 1e-3) for x in outputs))
        self._timed("backward", lambda: self._stage.backward(number, message))

    def _timed(self, kind, work):
        began = time.perf_counter()
        result = work()
        self.seconds[kind].append(time.perf_counter() - began)
        return result


def stage_costs(configuration, transport, seconds, scale):
    """Return for each rank the costs of its stage with all ranks at work, and the ratio for a rank that works alone."""
    rank = transport.position.rank
    stage = IsolatedStage(configuration, rank, create(configuration, scale))
    stage.run(0.0)  # warm up
    dist.barrier()
    stage.run(seconds)
    busy = {kind: list(taken) for kind, taken in stage.seconds.items()}
    dist.barrier()
    alone = None
    if rank == configuration.ranks // 2:
        stage.run(seconds / 2)
        alone = min(1.0, _sum(stage.seconds) / _sum(busy))
    dist.barrier()
    spread = [
        (statistics.mean(taken), statistics.pstdev(taken)) for taken in (busy["forward"], busy["backward"]) if taken
    ]
    own = {kind: statistics.mean(taken) for kind, taken in busy.items()}
    own["jitter"] = sum(deviation for _, deviation in spread) / sum(mean for mean, _ in spread)
    own["messages"] = stage.messages()
    gathered = transport.gather([own, alone])
    return [row[0] for row in gathered], next(row[1] for row in gathered if row[1] is not None)


def _sum(seconds):
    return statistics.mean(seconds["forward"]) + statistics.mean(seconds["backward"])


def pipeline_seconds(configuration, transport, updates, scale):
    """Return the seconds per update of the real pipeline: the median over ranks and windows of updates."""
    network, inputs, targets, sizes = create(configuration, scale)
    transport.extra = configuration.extra / 1e3
    trainer = petra.Trainer(
        network,
        loss=cross_entropy,
        optimizer=sgd,
        method=configuration.method,
        stages=sizes,
        accumulate=configuration.accumulate,
        schedule=configuration.schedule,
        transport=transport,
    )
    k = configuration.accumulate
    filled = k if trainer.schedule.exact else k * -(-(2 * trainer.schedule.staleness(0) + 2) // k)

    def run(count):
        for _ in range(count):
            trainer.step(inputs.clone(), targets)

    dist.barrier()
    run(filled)
    stamps = [time.perf_counter()]
    for _ in range(updates):
        run(k)
        stamps.append(time.perf_counter())
    trainer.drain()
    dist.barrier()
    transport.extra = 0.0
    windows = min(3, updates)
    edges = [round(i * updates / windows) for i in range(windows + 1)]
    own = [(stamps[b] - stamps[a]) / (b - a) for a, b in pairwise(edges)]
    gathered = transport.gather(own)
    found = [statistics.median(row[i] for row in gathered) for i in range(windows)]
    return statistics.median(found), found
