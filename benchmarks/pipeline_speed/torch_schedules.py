"""The schedules of torch.distributed.pipelining, each with and without activation checkpointing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from pipelines import Busy, Data, MakeOptimizer, sgd
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

from petra.pipeline import partition
from petra.reversible.streams import as_streams

SCHEDULES = {
    "gpipe": ("ScheduleGPipe", "one"),
    "1f1b": ("Schedule1F1B", "one"),
    "interleaved": ("ScheduleInterleaved1F1B", "loop"),
    "interleaved-zb": ("ScheduleInterleavedZeroBubble", "loop"),
    "zbv": ("ScheduleZBVZeroBubble", "v"),
    "dualpipev": ("ScheduleDualPipeV", "v"),
}
"""The class of each schedule, and how stages are placed: one per rank, or two in a loop or in the shape of a V."""


def owned_stages(placement: str, rank: int, ranks: int) -> list[int]:
    """Return the stages of a rank."""
    return {"one": [rank], "loop": [rank, ranks + rank], "v": [rank, 2 * ranks - 1 - rank]}[placement]


class TorchPipeline:
    """A schedule of torch.distributed.pipelining; the blocks are distributed evenly over its stages.

    Args:
        network: The layers: a stem, blocks, a head. All ranks create the same.
        cut: Returns the layers of each stage for a number of stages.
        data: The micro-batches of an update.
        loss: The loss of a micro-batch.
        name: A key of `SCHEDULES`.
        checkpointing: Save only the inputs of blocks, and recompute the rest in the backward pass.
        group: The process group of all ranks.
        optimizer: Makes the optimizer.

    Raises:
        ValueError: The schedule is not in this version of PyTorch, or not possible with these numbers.
    """

    def __init__(
        self,
        network: nn.Sequential,
        cut: Callable[[int], Sequence[int]],
        data: Data,
        loss: Callable[[Tensor, Tensor], Tensor],
        name: str,
        checkpointing: bool,
        group: dist.ProcessGroup,
        optimizer: MakeOptimizer = sgd,
    ) -> None:
        kind, placement = SCHEDULES[name]
        schedule = getattr(pipelining, kind, None)
        if schedule is None:
            raise ValueError(f"PyTorch {torch.__version__} has no {kind}")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        count = ranks if placement == "one" else 2 * ranks
        parts = partition(len(network), cut(count))
        owned = owned_stages(placement, rank, ranks)
        # The backward of the last stage follows at once, except in GPipe: recomputation would only cost time.
        self._modules = [
            TorchStage([network[i] for i in parts[s]], checkpointing and (name == "gpipe" or s < count - 1))
            for s in owned
        ]
        self.parameters = [p for module in self._modules for p in module.parameters()]
        self.optimizers = [optimizer(self.parameters)]
        stages = [
            _Stage(module, s, count, torch.device("cpu"), group=group)
            for module, s in zip(self._modules, owned, strict=True)
        ]
        given: Any = stages[0] if placement == "one" else stages
        self._schedule = schedule(given, n_microbatches=len(data), loss_fn=loss)
        takes_outputs = "return_outputs" in inspect.signature(self._schedule.step).parameters
        self._options = {"return_outputs": False} if takes_outputs else {}
        self._first, self._last = 0 in owned, count - 1 in owned
        self._size = len(data)
        self.load(data)
        self.busy = Busy()
        for stage in stages:
            self.busy.watch(stage, "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
        self.busy.watch(self.optimizers[0], "step")
        self.fill, self.lead = len(data), 0

    def load(self, data: Data) -> None:
        """Set the micro-batches of the next updates."""
        self._inputs = (torch.cat([x for x, _ in data]),) if self._first else ()
        self._targets = torch.cat([y for _, y in data]) if self._last else None

    def run(self, count: int) -> list[float]:
        assert count % self._size == 0
        found = []
        for _ in range(count // self._size):
            losses: list[Tensor] | None = None if self._targets is None else []
            self.optimizers[0].zero_grad(set_to_none=False)
            self._schedule.step(*self._inputs, target=self._targets, losses=losses, **self._options)
            self.optimizers[0].step()
            found += [float(loss.detach()) for loss in losses or ()]
        return found

    def settle(self) -> None:
        pass  # a step of the schedule waits for its messages

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.parameters]


class _Stage(PipelineStage):
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # Torch 2.11 sends the first messages also between two stages of one rank, and gloo cannot send to itself.
        return []


class TorchStage(nn.Module):
    """Layers one after the other; those with `checkpointing` save their inputs and are recomputed."""

    def __init__(self, layers: Sequence[nn.Module], checkpointing: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(_only, layer, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = _only(layer, x)
        return x


def _only(layer: nn.Module, x: Tensor) -> Tensor:
    (y,) = as_streams(layer(x))
    return y.contiguous()
