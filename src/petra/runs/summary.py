"""The summary of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from petra.measure import environment
from petra.runs.config import RunConfig
from petra.runs.file_hashes import read_json
from petra.runs.run_folder import SUMMARY
from petra.trainer.progress import RunProgress
from petra.trainer.state import weights_hash
from petra.trainer.trainer import Trainer


def summarise(
    config: RunConfig,
    trainer: Trainer,
    progress: RunProgress,
    weights: Mapping[str, Tensor],
    bits: float | None,
    steps: int,
) -> dict[str, Any]:
    """Return the contents of `summary.json`.

    Args:
        config: The configuration of the run.
        trainer: Its trainer.
        progress: Its final progress.
        weights: The weights of the whole network.
        bits: The test loss in bits per byte, if the data is a running text.
        steps: The number of updates.

    Returns:
        JSON values.
    """
    position = trainer.transport.position
    return {
        "method": config.method,
        "model": config.model,
        "data": config.data,
        "stages": trainer.layout["stages"],
        "ranks": position.ranks,
        "replicas": position.replicas,
        "schedule": trainer.schedule.name,
        "staleness": trainer.staleness,
        "corrections": trainer.layout["corrections"],
        "accumulate": config.accumulate,
        "epochs": config.epochs,
        "steps": steps,
        "seed": config.seed,
        "parameters": sum(p.numel() for p in trainer.network.parameters()),
        "test_accuracy": progress.test_accuracy,
        "test_loss": progress.test_loss,
        **({} if bits is None else {"bits_per_byte": bits}),
        **(
            {}
            if config.ema is None
            else {"ema_test_accuracy": progress.ema_test_accuracy, "ema_test_loss": progress.ema_test_loss}
        ),
        "best_test_accuracy": progress.best_accuracy,
        "best_epoch": progress.best_epoch,
        "best_step": progress.best_step,
        "stopped_early": progress.stopped_early,
        "samples_per_second": progress.rate,
        "captured_ticks": progress.captured_ticks,
        "not_captured": trainer.ineligible_reason,
        "activation_peak_bytes": progress.activation_peak,
        "memory_bytes": progress.memory,
        "weights_sha256": weights_hash(weights),
        "environment": environment(trainer.device),
    }


def read_summary(folder: Path, complete: bool = False) -> dict[str, Any]:
    """Read `summary.json` from the folder of a run.

    Args:
        folder: The folder of the run.
        complete: Check that it has all values that the result of a training is printed from.

    Returns:
        Its contents.

    Raises:
        ValueError: If it is missing or damaged.
    """
    remedy = f"restore a copy, or remove it and let `petra train --resume --out {folder}` write it again"
    found: dict[str, Any] = read_json(folder, SUMMARY, remedy)
    for name, kind in _PRINTED.items() if complete else ():
        if not isinstance(found.get(name), kind):
            raise ValueError(f"{folder / SUMMARY} is damaged (it has no valid {name}): {remedy}")
    return found


_NUMBERS = ("test_accuracy", "best_test_accuracy", "best_epoch", "test_loss", "samples_per_second")
_PRINTED: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("method", "schedule"), str),
    **dict.fromkeys(("stages", "corrections", "memory_bytes"), list),
    **dict.fromkeys(("ranks", "replicas", "activation_peak_bytes"), int),
    **dict.fromkeys(_NUMBERS, (int, float)),
}
"""The types of the values that `petra train` and `petra compare` print."""
