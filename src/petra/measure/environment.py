"""Where a figure was measured, and with which code: stored beside every result."""

from __future__ import annotations

import os
import platform
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch


def source_hash(folder: Path) -> str:
    """The first digits of a SHA-256 of names and contents of all modules in a folder, compiled ones left out."""
    whole = sha256()
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py")):
        whole.update(sha256(name.encode()).digest() + sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:12]


# When Petra is imported, not when it is asked for: files may be changed while a training goes on with what they were.
_SOURCE = source_hash(Path(__file__).parents[1])


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Code, versions, hardware; on a GPU, whether cuDNN chooses algorithms by time, so maybe others the next time."""
    device = torch.device(device)
    found = {
        "source": _SOURCE,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
    return found | ({"cudnn_benchmark": torch.backends.cudnn.benchmark} if device.type == "cuda" else {})
