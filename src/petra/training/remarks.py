"""What a user may not have meant, in a line each, when a run begins."""

from __future__ import annotations

from collections.abc import Iterator

from petra.methods.petra import Petra
from petra.names import counted
from petra.reversible import ReversibleLayer
from petra.training.config import RunConfig
from petra.training.trainer import Trainer


def remarks(config: RunConfig, trainer: Trainer) -> Iterator[str]:
    """Lines about options that are allowed, and seldom what was wanted."""
    if 0 < config.epochs <= config.warmup_epochs:
        warm = f"{counted(config.warmup_epochs, 'epoch')} of warm-up for {config.epochs} of training"
        yield f"{warm}: the learning rate never gets to its full value (--warmup-epochs)"
    if isinstance(trainer.method, Petra) and not any(isinstance(layer, ReversibleLayer) for layer in trainer.network):
        yield (
            f"no layer of {config.model} is reversible, so {config.method} keeps their inputs and computes them again: "
            "`petra models` lists networks that are"
        )
