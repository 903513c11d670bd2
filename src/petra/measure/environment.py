"""The environment of a measurement: code, versions and hardware. It is stored with every result."""

from __future__ import annotations

import os
import platform
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch


def source_hash(folder: Path) -> str:
    """Return the first 12 digits of a SHA-256 of the names and contents of all Python files in a folder."""
    digest = sha256()
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py")):
        digest.update(sha256(name.encode()).digest() + sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


# Computed at import, because the files may change while a training runs.
_SOURCE = source_hash(Path(__file__).parents[1])


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return a description of the code, versions and hardware.

    Args:
        device: The device of the measurement.

    Returns:
        Plain values by name. On a GPU, `cudnn_benchmark` says whether cuDNN selects algorithms by time, so that another
        run may use different ones.
    """
    device = torch.device(device)
    result = {
        "source": _SOURCE,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
    return result | ({"cudnn_benchmark": torch.backends.cudnn.benchmark} if device.type == "cuda" else {})
