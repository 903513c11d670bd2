"""Checkpoints of runs for `torch.distributed.checkpoint`: weights and the state of optimizers under plain names."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from petra.distributed import SingleProcess
from petra.runs.run_folder import CHECKPOINTS
from petra.trainer.checkpoint_folder import Checkpoints


def checkpoint_state(folder: str | Path, number: int | None = None) -> dict[str, Any]:
    """Read a checkpoint of a run as one state for plain PyTorch.

    Args:
        folder: The folder of the run.
        number: The number of the checkpoint; None for the last one.

    Returns:
        `model`: the weights and buffers by name. `optimizer`: under the names of the parameters, the `state` of each
        (such as `momentum_buffer`) and its `settings` (such as `lr`). `progress`: the numbers of `epoch` and
        `microbatches`. What is in flight is not part of it.

    Raises:
        ValueError: If there is no such checkpoint, or it is damaged.
    """
    checkpoints = Checkpoints(Path(folder) / CHECKPOINTS, SingleProcess(), number=number)
    if not checkpoints.exist():
        raise ValueError(f"{folder} has no checkpoint: give the folder of a run that has written one")
    run = checkpoints.run()
    model: dict[str, Any] = {}
    state: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for stage in range(len(run["layout"]["stages"])):
        weights = checkpoints.stage(stage)["weights"]
        model |= weights["network"]
        if weights["optimizer"] is not None:
            state |= weights["optimizer"]["state"]
            for group in weights["optimizer"]["groups"]:
                settings |= {name: dict(group["settings"]) for name in group["names"]}
    progress = {name: run["progress"][name] for name in ("epoch", "microbatches")}
    return {"model": model, "optimizer": {"state": state, "settings": settings}, "progress": progress}


def export_checkpoint(folder: str | Path, out: str | Path, number: int | None = None) -> None:
    """Convert a checkpoint of a run to one of `torch.distributed.checkpoint`.

    Args:
        folder: The folder of the run.
        out: The folder to write.
        number: The number of the checkpoint; None for the last one.

    Raises:
        ValueError: If there is no such checkpoint, or it is damaged.

    Example:
        ```python
        export_checkpoint("runs/digits", "checkpoint-dcp")
        state = {"model": network.state_dict()}
        torch.distributed.checkpoint.load(state, checkpoint_id="checkpoint-dcp")
        ```
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)  # as intended, in one process
        save(_contiguous(checkpoint_state(folder, number)), checkpoint_id=str(out), no_dist=True)


def _contiguous(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _contiguous(entry) for key, entry in value.items()}
    return value.detach().contiguous() if isinstance(value, torch.Tensor) else value
