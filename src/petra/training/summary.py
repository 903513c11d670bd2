"""What a run came to, in a few lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from petra.measure import environment
from petra.training.config import RunConfig
from petra.training.position import Position
from petra.training.trainer import Trainer, weights_hash


def summarise(config: RunConfig, trainer: Trainer, position: Position, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Of a run that is done; ``weights`` are those of the whole network."""
    place = trainer.transport.place
    return {
        "method": config.method,
        "model": config.model,
        "data": config.data,
        "stages": trainer.layout["stages"],
        "ranks": place.ranks,
        "replicas": place.replicas,
        "order": trainer.order.name,
        "staleness": trainer.layout["in_flight"],
        "corrections": trainer.layout["corrections"],
        "accumulate": config.accumulate,
        "epochs": config.epochs,
        "seed": config.seed,
        "parameters": sum(p.numel() for p in trainer.network.parameters()),
        "test_accuracy": position.test_accuracy,
        "test_loss": position.test_loss,
        "best_test_accuracy": position.best_accuracy,
        "best_epoch": position.best_epoch,
        "samples_per_second": position.rate,
        "replayed_ticks": position.replayed,
        "not_replayed": trainer.executor.refusal,
        "activation_peak_bytes": position.activation_peak,
        "memory_bytes": position.memory,
        "weights_sha256": weights_hash(weights),
        "environment": environment(trainer.device),
    }


def read_summary(file: Path) -> dict[str, Any]:
    """What `summarise` gave, from the file that it was written to."""
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}): remove it and resume again") from error
