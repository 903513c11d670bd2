"""The checks of `petra doctor`: the ranks time messages, and compare a small pipeline with one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from petra import models
from petra.distributed import Transport
from petra.pipeline import Stage
from petra.pipeline.message_layout import layout_of
from petra.reversible import Network
from petra.schedule import Action, Kind
from petra.trainer import Trainer
from petra.trainer.loss import cross_entropy
from petra.trainer.optimizers import sgd

_LABEL = Action(0, Kind.FORWARD, 0)
_SMALL = 2
"""Numbers of a message that measures the latency."""


@dataclass
class LinkSpeed:
    """The speed of messages from one rank to another."""

    source: int
    to: int
    latency: float
    """Seconds of a small message."""
    bandwidth: float
    """Bytes per second of a large one."""


@dataclass
class PipelineCheck:
    """The comparison of a pipeline on the ranks with one process."""

    captured: bool
    ticks: int
    captured_ticks: int
    """The fewest of any rank."""
    reason: str | None
    """Why a rank does not capture ticks."""
    milliseconds: float
    """Per tick of the second half, on the slowest rank."""
    difference: str | None
    """The first rank and stage that differ from one process; None if all bits are equal."""


def time_links(transport: Transport, device: torch.device, size: int, seconds: float) -> list[LinkSpeed]:
    """Time messages between neighbours, in both directions, one pair after another. All ranks call it.

    Args:
        transport: The transport of this rank.
        device: The device of the messages.
        size: The bytes of a large message.
        seconds: How long to measure each pair, about.

    Returns:
        The speeds, the same on every rank.
    """
    pairs = [(rank, rank + 1) for rank in range(transport.position.ranks - 1)]
    transport.connect([*pairs, *((b, a) for a, b in pairs)])
    found: list[LinkSpeed] = []
    for a, b in pairs:
        for source, to in ((a, b), (b, a)):
            small = _round_trip(transport, device, source, to, _SMALL, seconds / 8)
            large = _round_trip(transport, device, source, to, max(1, size // 4), seconds / 4)
            own = [small / 2, 4 * max(1, size // 4) / max(1e-9, large - small / 2)]
            latency, bandwidth = transport.gather(own)[source]
            found.append(LinkSpeed(source, to, latency, bandwidth))
    return found


def _round_trip(transport: Transport, device: torch.device, source: int, to: int, count: int, seconds: float) -> float:
    """Return the seconds in which numbers go to a rank and a short answer comes back; meaningless on other ranks."""
    message, answer = torch.zeros(count, device=device), torch.zeros(_SMALL, device=device)
    rank, times = transport.position.rank, list[float]()
    repeats, done = 3, 0
    while repeats > 0:
        for _ in range(repeats):
            began = time.perf_counter()
            transport.begin_tick()
            if rank == source:
                transport.send(to, _LABEL, (message,))
                _wait(transport.receive(to, _LABEL, layout_of((answer,)))()[0])
            elif rank == to:
                _wait(transport.receive(source, _LABEL, layout_of((message,)))()[0])
                transport.send(source, _LABEL, (answer,))
            times.append(time.perf_counter() - began)
        transport.flush()
        done += repeats
        # The sender decides for all how often to repeat.
        repeats = (
            int(transport.gather(min(200 - done, int(seconds / max(1e-6, times[-1]))))[source]) if done == 3 else 0
        )
    return statistics.median(times[1:])


def _wait(tensor: Tensor | None) -> None:
    if tensor is not None and tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def small_network(stages: int) -> Network:
    """Return a RevNet with at least one layer for each stage.

    Args:
        stages: The number of stages.

    Returns:
        The network, with the same weights on every rank.
    """
    torch.manual_seed(0)
    return models.create("revnet18", width=8, depths=(max(2, stages - 3), 1), num_classes=10)


def compare_with_one_process(
    transport: Transport, device: torch.device, ticks: int, cuda_graph: bool | None
) -> PipelineCheck:
    """Train on all ranks and, on each rank, the same network in one process; compare all bits. All ranks call it.

    Args:
        transport: The transport of this rank.
        device: The device of this rank.
        ticks: The ticks before the pipeline is emptied.
        cuda_graph: Whether the ranks capture their ticks.

    Returns:
        The comparison, the same on every rank.
    """
    ranks = transport.position.ranks
    make = partial(
        Trainer,
        method="petra",
        stages=max(4, ranks),
        loss=cross_entropy,
        optimizer=partial(sgd, lr=0.05, weight_decay=1e-3),
        device=device,
    )
    together = make(small_network(max(4, ranks)), transport=transport, cuda_graph=cuda_graph)
    alone = make(small_network(max(4, ranks)), cuda_graph=False)
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 3, 16, 16, generator=generator), torch.arange(8) % 10) for _ in range(ticks)]
    began = time.perf_counter()
    for tick, (x, y) in enumerate(data):
        if tick == ticks // 2:  # the first half starts libraries and captures
            began = time.perf_counter()
        together.step(x, y)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    together.drain()
    for x, y in data:
        alone.step(x, y)
    alone.drain()
    capture = together.executor.capture
    captured, reason = (0, None) if capture is None else (capture.captured_ticks, capture.ineligible_reason)
    own = [_difference(together.stages, alone.stages, transport.position.rank), captured, reason, seconds]
    rows = transport.gather(own)
    return PipelineCheck(
        captured=cuda_graph is not False,
        ticks=ticks,
        captured_ticks=min(row[1] for row in rows),
        reason=next((row[2] for row in rows if row[2]), None),
        milliseconds=1000 * max(row[3] for row in rows) / (ticks - ticks // 2),
        difference=next((row[0] for row in rows if row[0]), None),
    )


def _difference(stages: Sequence[Stage], reference: Sequence[Stage], rank: int) -> str | None:
    """Describe the first stage whose weights, statistics or optimizer state differ."""
    for stage in stages:
        other = reference[stage.index].trained()
        pairs = [(a.detach(), b.detach()) for a, b in zip(stage.trained(), other, strict=True)]
        if not all(torch.equal(a, b) for a, b in pairs):
            most = max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())
            return f"rank {rank}, stage {stage.index}: numbers differ by up to {most:.1e}"
    return None
