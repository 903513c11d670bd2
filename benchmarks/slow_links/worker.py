"""One rank of the benchmark: trains pipelines one after another, and writes the seconds per micro-batch."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import petra
from petra.distributed import ProcessTransport
from petra.measure import PipelineOverLinks, environment
from petra.methods import METHODS
from petra.pipeline import ShapeInference, partition
from petra.pipeline.message_format import MessageFormat
from petra.pipeline.message_layout import payload
from petra.pipeline.message_shapes import shapes_of
from petra.schedule import AsyncSchedule

CLASSES = 10
COMM_DTYPES = {"none": None, "bf16": "bf16", "int8": "int8"}
"""The dtypes of messages by name."""
FILL = 2
"""Fillings of the pipeline before the measurement; TCP raises its speed meanwhile."""


@dataclass
class Work:
    """The sizes, pipelines and links of a measurement, the same on all ranks."""

    ranks: int
    compute_ms: float | None
    """Milliseconds of a stage's forward and backward, if they are a stand-in; None for a RevNet."""
    message_mib: float
    """MiB of the streams between two stages in float32, of the stand-in."""
    batch_size: int
    width: int
    blocks: int
    accumulate: int
    pipelines: list[tuple[str, str]]
    """The pipelines, as names of schedules and of dtypes of messages."""
    ticks: int
    rounds: int
    latency: float
    """Seconds; of the links, for which numbers in flight are chosen."""
    bandwidth: float
    """Bytes per second."""
    seconds: float | None
    """Seconds per micro-batch of the slowest stage, if they are known from unthrottled links."""


class Wait(torch.autograd.Function):
    """The identity, which takes time in both directions, without using a core."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        time.sleep(context.seconds)
        return gradients[0], None


class Residual(nn.Module):
    """A residual function with one parameter, which takes a third of the time of a stage."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.full((), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        # Reconstruction evaluates the function again, so a backward takes twice as long as a forward.
        return Wait.apply(x, self.seconds / 3) * self.scale


class Split(nn.Module):
    """Makes two streams of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale, x


class Join(nn.Module):
    """Computes the outputs from two streams."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x + y)


class Rank:
    """One rank, which trains all pipelines."""

    def __init__(self, work: Work, transport: ProcessTransport) -> None:
        self.work, self.transport = work, transport
        torch.manual_seed(1)
        if work.compute_ms is None:
            self.inputs = torch.randn(work.batch_size, 3, 32, 32)
            blocks = [work.blocks] * work.ranks
        else:
            features = int(work.message_mib * 2**20 / 4 / 2 / work.batch_size)
            self.inputs = torch.randn(work.batch_size, features)
            blocks = [1] * work.ranks
        self.targets = torch.randint(CLASSES, (work.batch_size,))
        blocks[0] += 1  # the stem
        blocks[-1] += 1  # the head
        self.stages = blocks

    def network(self) -> petra.Network:
        """Return the layers, with the same weights on all ranks."""
        torch.manual_seed(0)
        work = self.work
        if work.compute_ms is None:
            return petra.models.create("revnet18", depths=(work.blocks * work.ranks,), width=work.width)
        stages = [petra.ReversibleResidual(Residual(work.compute_ms / 1e3)) for _ in range(work.ranks)]
        return petra.Network(Split(), *stages, Join(self.inputs.shape[1]))

    def message_bytes(self, dtype: str) -> tuple[list[int], list[int]]:
        """Return the bytes of a message from each stage to the next, and of one back."""
        with torch.device("meta"):
            network = list(self.network())
        cuts = partition(len(network), self.stages)
        format = MessageFormat.of(COMM_DTYPES[dtype])
        shapes = ShapeInference(network, cuts, METHODS["petra"], format).shapes(shapes_of((self.inputs,)))
        sizes = [
            [payload([t for t in message if t is not None]) for message in messages]
            for messages in (shapes.forward[1:], shapes.backward[:-1])
        ]
        return sizes[0], sizes[1]

    def in_flight(self, schedule: str, dtype: str, seconds: float) -> str | list[int]:
        """Return the schedule for the trainer; `adapted` is replaced by numbers in flight."""
        if schedule != "adapted":
            return schedule
        return self.slow_pipeline(dtype, seconds).least_in_flight()

    def slow_pipeline(self, dtype: str, seconds: float) -> PipelineOverLinks:
        ranks = self.work.ranks
        up, down = self.message_bytes(dtype)
        return PipelineOverLinks([seconds] * ranks, range(ranks), up, down, self.work.latency, self.work.bandwidth)

    def measure(self, schedule: str, dtype: str, seconds: float) -> dict[str, Any]:
        """Train a pipeline. Return the seconds per micro-batch of each window on this rank."""
        work = self.work
        trainer = petra.Trainer(
            self.network(),
            loss=cross_entropy,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-4),
            method="petra",
            stages=self.stages,
            accumulate=work.accumulate,
            schedule=self.in_flight(schedule, dtype, seconds),
            comm_dtype=COMM_DTYPES[dtype],
            transport=self.transport,
        )
        for _ in range(work.accumulate * -(-(FILL * trainer.staleness[0] + 2) // work.accumulate)):
            trainer.step(self.inputs, self.targets)
        windows = []
        size = work.accumulate * -(-work.ticks // work.accumulate)
        for _ in range(work.rounds):
            began = time.perf_counter()
            for _ in range(size):
                trainer.step(self.inputs, self.targets)
            windows.append((time.perf_counter() - began) / size)
        trainer.drain()
        up, down = self.message_bytes(dtype)
        known = self.slow_pipeline(dtype, seconds) if isinstance(trainer.schedule, AsyncSchedule) else None
        return {
            "schedule": schedule,
            "dtype": dtype,
            "in_flight": trainer.staleness,
            "windows": windows,
            "up_bytes": up,
            "down_bytes": down,
            "predicted": None if known is None else known.period(trainer.staleness),
        }


def main(arguments: list[str]) -> None:
    """Join the other ranks, measure, and write the result of this rank into a folder."""
    address, rank, timeout, folder, text = arguments
    given = json.loads(text)
    work = Work(**{**given, "pipelines": [(a, b) for a, b in given["pipelines"]]})
    torch.set_num_threads(1)
    limit = timedelta(seconds=float(timeout))
    dist.init_process_group("gloo", init_method=address, rank=int(rank), world_size=work.ranks, timeout=limit)
    own = Rank(work, ProcessTransport(timeout=limit))
    seconds = work.seconds or (work.compute_ms or 100.0) / 1e3
    found = [own.measure(schedule, dtype, seconds) for schedule, dtype in work.pipelines]
    Path(folder, f"{rank}.json").write_text(json.dumps({"pipelines": found, "environment": environment()}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
