"""Describes a training in advance: its stages, staleness, memory and time, without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from petra import methods
from petra.data import Batches, Data
from petra.formatting import counted, mebibytes, render
from petra.measure import profile
from petra.measure.memory_estimate import MemoryEstimator
from petra.measure.stage_memory import StageMemory
from petra.measure.tick_time import tick_seconds
from petra.methods import Settings
from petra.pipeline import partition
from petra.reversible.streams import as_streams
from petra.runs.config import RunConfig
from petra.runs.trained_network import NetworkSpec
from petra.schedule import PipelineSchedule
from petra.trainer.loss import cross_entropy
from petra.trainer.schedules import choose_schedule
from petra.trainer.validation import place_stages


@dataclass(frozen=True)
class DryRun:
    """The plan of a training."""

    config: RunConfig
    schedule: PipelineSchedule
    cuts: list[range]
    parameters: list[int]
    """The number of parameters of each stage."""
    memory: list[StageMemory]
    """The predicted peak memory of each stage."""
    seconds: float
    """The predicted time of a micro-batch."""
    batches: int
    """The micro-batches of an epoch."""
    ranks: int
    device: torch.device

    def report(self) -> str:
        """Return the plan as text.

        Returns:
            A table of the stages, and the totals.
        """
        config, schedule = self.config, self.schedule
        header = ["stage", "layers", "parameters", "staleness", "weights", "optimizer", "gradients", "activations"]
        rows: list[list[object]] = []
        for stage, (cut, count, memory) in enumerate(zip(self.cuts, self.parameters, self.memory, strict=True)):
            layers = f"{cut.start}-{cut.stop - 1}" if len(cut) > 1 else str(cut.start)
            sizes = (memory.weights + self._average(memory), memory.optimizer, memory.gradients)
            others = memory.activations + memory.stashed_weights + memory.synthesizer
            cells = [mebibytes(size) for size in (*sizes, others, self._total(memory))]
            rows.append([stage, layers, f"{count:,}", f"{schedule.delay(stage):g}", *cells])
        totals = [sum(self.parameters), sum(self._total(memory) for memory in self.memory)]
        rows.append(["all", "", f"{totals[0]:,}", *[""] * 5, mebibytes(totals[1])])
        epochs = config.training_epochs(self.batches)
        steps = int(epochs * self.batches / config.accumulate)
        epoch = self.seconds * self.batches
        return "\n".join(
            [
                f"{config.model} with {config.method} ({schedule.name}) on {config.data}: "
                f"{counted(len(self.cuts), 'stage')}, {counted(self.ranks, 'rank')}",
                f"{self.batches} micro-batches of {config.batch_size} per epoch, {config.accumulate} per update; "
                f"{steps} updates in {counted(round(epochs, 2), 'epoch')}; {config.optimizer} with learning rate "
                f"{config.base_lr:g} after warm-up",
                "",
                render([*header, "total"], rows),
                "",
                f"predicted: {_time(epoch)} per epoch, {_time(epoch * epochs)} in all, without evaluations, on "
                f"{self.device.type}",
                "staleness is the number of updates between forward and backward; activations include stashed weights",
            ]
        )

    def _average(self, memory: StageMemory) -> int:
        return memory.weights if self.config.ema is not None else 0

    def _total(self, memory: StageMemory) -> int:
        return memory.total + self._average(memory)


class _Matrices:
    """Stands for the matrices that Muon orthogonalises; copies of a network have other tensors."""

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and tensor.ndim > 1


def dry_run(
    config: RunConfig,
    device: torch.device,
    *,
    ranks: int = 1,
    placement: Sequence[int] | None = None,
    data: Data | None = None,
) -> DryRun:
    """Plan a training. Nothing is written.

    Args:
        config: Its configuration.
        device: The device to time layers on.
        ranks: The number of processes that share the stages.
        placement: The rank of each stage.
        data: The data, if it has been loaded already.

    Returns:
        The plan.

    Raises:
        ValueError: If the configuration is not valid.
    """
    config.validate()
    data = config.load_data() if data is None else data
    size = max(1, config.batch_size // config.replicas)
    options: dict[str, Any] = {"seed": config.seed, "drop_last": config.drop_last, "device": device}
    train = Batches(data, "train", config.batch_size, channels_last=config.channels_last, **options)
    x, y = next(iter(train.epoch(0)))
    inputs, targets = tuple(t[:size] for t in as_streams(x)), y[:size]
    torch.manual_seed(config.seed)
    network = NetworkSpec.of(config, data).network().to(device)
    if config.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    method, cuts = methods.find(config.method), partition(len(network), config.stages)
    schedule = choose_schedule(method, len(cuts), config.accumulate, config.schedule, config.flush_until, ranks)
    layers: list[nn.Module] = list(network)
    optimizer = partial(config.make_optimizer, hidden=_Matrices())
    estimator = MemoryEstimator(layers, method, inputs, targets, loss=config.loss, optimizer=optimizer)
    times = profile(
        layers,
        method,
        inputs,
        targets,
        loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=1e-4),  # other optimizers could diverge where no schedule warms them up
        settings=Settings(device, config.seed, config.autocast_dtype),
        repeats=3,
        warmup=1,
    )
    where = place_stages(len(cuts), ranks, placement, schedule)
    return DryRun(
        config=config,
        schedule=schedule,
        cuts=cuts,
        parameters=[sum(p.numel() for i in cut for p in network[i].parameters()) for cut in cuts],
        memory=estimator.memory(cuts, 0, schedule),
        seconds=tick_seconds(schedule, where, [times.stage(cut) for cut in cuts]),
        batches=len(train),
        ranks=ranks,
        device=device,
    )


def _time(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
