"""Where a figure was measured: stored beside every result."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions and hardware."""
    device = torch.device(device)
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
