"""A cache of plans, by everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

import petra
from petra.memory.memory_plan import MemoryPlan
from petra.memory.step_cost import StepCost
from petra.reversible import Network


def cache_folder() -> Path:
    """Return the folder of the plans, `petra/memory` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "petra" / "memory"


def cache_key(network: Network, device: torch.device, limit: int, choices: Sequence[object]) -> str:
    """Return a key of everything that a plan depends on.

    Args:
        network: The network.
        device: The device.
        limit: The bytes that are allowed.
        choices: Further values that decide, such as the peak memory of the slowest step, which depends on the batch.

    Returns:
        A hexadecimal number.
    """
    parameters = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in network.named_parameters()]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {torch.get_num_threads()}"
    versions = (petra.__version__, torch.__version__)
    text = repr((str(network), parameters, name, versions, limit, *choices))
    return hashlib.sha256(text.encode()).hexdigest()


def read_plan(key: str, layers: int) -> MemoryPlan | None:
    """Return the plan with this key; None if there is none, or if its file is damaged.

    Args:
        key: The key.
        layers: The number of layers.

    Returns:
        The plan, without the other measurements.
    """
    try:
        found = json.loads((cache_folder() / f"{key}.json").read_text())
        storages = tuple(str(storage) for storage in found["storages"])
        cost = StepCost(float(found["seconds"]), int(found["peak"]))
        plan = MemoryPlan(int(found["limit"]), storages, int(found["parts"]), cost, ())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return plan if len(storages) == layers else None


def write_plan(key: str, plan: MemoryPlan) -> None:
    """Keep a plan for the next time. A folder that cannot be written is no error.

    Args:
        key: The key.
        plan: The plan.
    """
    content = {
        "limit": plan.limit,
        "storages": plan.storages,
        "parts": plan.parts,
        "seconds": plan.cost.seconds,
        "peak": plan.cost.peak,
    }
    file = cache_folder() / f"{key}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(content) + "\n")
        new.replace(file)
    except OSError:
        return
