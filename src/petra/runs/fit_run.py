"""Chooses the storage of layers, and the size of micro-batches, so that a run fits into memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from petra.data import Data, close_batches
from petra.distributed import SingleProcess
from petra.memory import COMPILED_STORAGES, MemoryPlan, PlanSearch, allocated_bytes
from petra.reversible.module_state import normalisations
from petra.reversible.storage import shorten_storages
from petra.runs.config import RunConfig
from petra.runs.trained_network import NetworkSpec
from petra.runs.trainer_setup import TrainerSetup

MAX_PARTS = 16


def fit_run(
    config: RunConfig,
    limit: int,
    device: torch.device,
    data: Data,
    files: Mapping[str, bytes],
    *,
    split: bool,
    quiet: bool,
) -> tuple[RunConfig, MemoryPlan]:
    """Find the storages and the size of micro-batches of the fastest update that fits into memory.

    Args:
        config: The configuration of the run.
        limit: The bytes for weights, gradients, optimizer state and activations.
        device: The device.
        data: The data.
        files: The vocabulary and tokenizer files of the data.
        split: Allow smaller micro-batches, with correspondingly more of them per update.
        quiet: Show no progress bar.

    Returns:
        The configuration with other storages, and perhaps with smaller micro-batches; and the plan.

    Raises:
        ValueError: If nothing fits, or the configuration is not for one process and method reversible.
    """
    if config.method not in ("reversible", "pareprop"):
        raise ValueError(
            f"--memory chooses what layers store, and method {config.method} does not let it: add --method reversible, "
            "or leave --memory out"
        )
    batches = config.make_batches(data, "train", config.batch_size, device=device)
    try:
        x, y = next(iter(batches.epoch(0)))
    finally:
        close_batches(batches)
    steps = _Steps(config, TrainerSetup(config, NetworkSpec.of(config, data), len(batches), device, files, False), x, y)
    # Parts of a batch have other batch statistics.
    may_split = split and not normalisations([steps.network])
    search = PlanSearch(
        steps.network,
        limit,
        steps.run,
        device,
        allocated=steps.allocated,
        storages=COMPILED_STORAGES if config.compile else ("store",),
        recompute=False,
        max_parts=gcd(config.batch_size, MAX_PARTS) if may_split else 1,
        quiet=quiet,
    )
    plan = search.run(cache=True)
    return steps.with_parts(plan.parts, plan.storages), plan


class _Steps:
    """Updates of a temporary trainer."""

    def __init__(self, config: RunConfig, setup: TrainerSetup, x: Any, y: Any) -> None:
        self._config, self._setup, self._x, self._y = config, setup, x, y
        self._parts = 1
        self._trainer = setup.build(SingleProcess(setup.device), config.stages, config.schedule)
        self.network = self._trainer.network

    def with_parts(self, parts: int, storages: tuple[str, ...] = ()) -> RunConfig:
        """Return the configuration with smaller micro-batches."""
        config = self._config
        return replace(
            config,
            batch_size=config.batch_size // parts,
            accumulate=config.accumulate * parts,
            storage=shorten_storages(storages) if storages else config.storage,
        )

    def run(self, parts: int) -> None:
        """Make one update."""
        if parts != self._parts:
            self._parts = parts
            self._trainer = replace(self._setup, config=self.with_parts(parts)).trainer_of(self.network)
        trainer = self._trainer
        for stage in trainer.stages:
            stage.layers.find_segments()
        for index in range(self._config.accumulate * parts):
            trainer.step(_part(self._x, index % parts, parts), _part(self._y, index % parts, parts))

    def allocated(self) -> int:
        """Return the bytes of weights, gradients and optimizer state."""
        return allocated_bytes(
            self.network, [stage.optimizer for stage in self._trainer.stages if stage.optimizer is not None]
        )


def _part(batch: Any, index: int, parts: int) -> Any:
    return tree_map_only(Tensor, lambda t: t.chunk(parts)[index], batch)
