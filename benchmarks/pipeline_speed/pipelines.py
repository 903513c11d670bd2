"""The pipelines that are compared: Petra's trainer on ranks, and 1F1B of torch.distributed.pipelining."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import petra
from petra.distributed import Transport
from petra.pipeline import partition
from petra.reversible.streams import as_streams, single

Data = Sequence[tuple[Tensor, Tensor]]
"""The micro-batches of an update; every update uses the same ones."""


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of all pipelines; only speed is measured."""
    return torch.optim.SGD(parameters, 1e-4, momentum=0.9)


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Busy:
    """Adds up the seconds spent in the given methods of an object."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, worker: object, *names: str) -> None:
        for name in names:
            setattr(worker, name, self._timed(getattr(worker, name)))

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = work(*arguments, **named)
            self.seconds += time.perf_counter() - began
            return result

        return timed


class Pipeline(Protocol):
    """One rank's part of a pipeline; every rank makes the same calls."""

    busy: Busy
    fill: int
    """Micro-batches until every stage works and the micro-batches of one update have reached the loss."""
    lead: int
    """Micro-batches after a stop until the stages are as far apart again as in steady state."""

    def run(self, count: int) -> list[float]:
        """Read `count` micro-batches and return the losses that were computed, on the last rank."""

    def settle(self) -> None:
        """Wait until all messages have been sent."""

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of this rank's parameters that the last update used."""


class PetraPipeline:
    """A method of Petra; the cut gives the layers and the rank of each stage."""

    def __init__(
        self,
        network: nn.Sequential,
        cut: tuple[Sequence[int], Sequence[int]],
        data: Data,
        transport: Transport,
        method: str,
        schedule: str | None,
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
        optimizer: MakeOptimizer = sgd,
    ) -> None:
        self._transport = transport
        self.data = data
        spare = [3 * above for above in reversed(range(len(cut[0])))]
        self._trainer = petra.Trainer(
            network,
            loss=loss,
            optimizer=optimizer,
            method=method,
            stages=cut[0],
            placement=cut[1],
            accumulate=len(data),
            schedule=spare if schedule == "spare" else schedule,
            transport=transport,
        )
        self.optimizers = [stage.optimizer for stage in self._trainer.stages]
        self.busy = Busy()
        for stage in self._trainer.stages:
            self.busy.watch(stage, "forward", "compute_loss", "backward", "update", "train_synthesizer")
        used = self._trainer.schedule
        staleness = 0 if used.exact else used.staleness(0)
        self.fill = staleness + len(data)
        self.lead = 1 if staleness else 0

    def run(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            x, y = self.data[self._trainer.executor.microbatches % len(self.data)]
            losses += [float(finished.loss) for finished in self._trainer.step(x, y)]
        return losses

    def settle(self) -> None:
        self._transport.flush()

    def gradients(self) -> list[Tensor | None]:
        return [g for stage in self._trainer.stages for g in stage.gradients()]


class Torch1F1B:
    """torch.distributed.pipelining with Schedule1F1B and activation checkpointing, one stage per rank."""

    def __init__(self, network: nn.Sequential, cut: Sequence[int], data: Data, timeout: timedelta) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        layers = [network[i] for i in partition(len(network), cut)[rank]]
        self._module = CheckpointedStage(layers, last=rank == ranks - 1)
        self._optimizer = sgd(list(self._module.parameters()))
        group = dist.new_group(timeout=timeout)
        stage = PipelineStage(self._module, rank, ranks, torch.device("cpu"), group=group)
        self._schedule = Schedule1F1B(stage, n_microbatches=len(data), loss_fn=cross_entropy)
        self._inputs = (torch.cat([x for x, _ in data]),) if rank == 0 else ()
        self._targets = torch.cat([y for _, y in data]) if rank == ranks - 1 else None
        self._size = len(data)
        self.busy = Busy()
        self.busy.watch(stage, "forward_one_chunk", "backward_one_chunk")
        self.busy.watch(self._optimizer, "step")
        self.fill, self.lead = len(data), 0

    def run(self, count: int) -> list[float]:
        assert count % self._size == 0
        found = []
        for _ in range(count // self._size):
            losses: list[Tensor] | None = None if self._targets is None else []
            self._optimizer.zero_grad()
            self._schedule.step(*self._inputs, target=self._targets, losses=losses)
            self._optimizer.step()
            found += [float(loss.detach()) for loss in losses or ()]
        return found

    def settle(self) -> None:
        pass  # a step of the schedule waits for its messages

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self._module.parameters()]


class CheckpointedStage(nn.Module):
    """Layers that save their inputs and are recomputed in the backward pass.

    The last stage is not checkpointed: its backward follows immediately, and would recompute what is still in memory.
    """

    def __init__(self, layers: Sequence[nn.Module], last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.last = last

    def forward(self, *streams: Tensor) -> Any:
        if self.last:
            return single(self._run(*streams))
        return checkpoint(self._run, *streams, use_reentrant=False, preserve_rng_state=False)

    def _run(self, *streams: Tensor) -> tuple[Tensor, ...]:
        for layer in self.layers:
            streams = as_streams(layer(*streams))
        return tuple(x.contiguous() for x in streams)


def check_losses(losses: Sequence[Sequence[float]], names: Sequence[str], size: int) -> None:
    """Check that the first `size` micro-batches, before any update, have the same losses in every pipeline."""
    for name, found in zip(names, losses, strict=True):
        pair = torch.tensor(found[:size]), torch.tensor(losses[0][:size])
        assert len(pair[0]) == size, f"{name} has {len(pair[0])} losses, not {size}"
        assert torch.allclose(*pair, rtol=1e-4), f"losses of {name} and {names[0]} differ: {pair}"


def check_gradients(found: Sequence[Sequence[Tensor | None]]) -> None:
    """Check that all gradients agree up to rounding."""
    joined = [torch.cat([g.flatten() for g in gradients if g is not None]) for gradients in found]
    for gradients in joined[1:]:
        error = float((gradients - joined[0]).norm() / joined[0].norm())
        assert error < 1e-3, f"gradients of the first update differ by {error}"
