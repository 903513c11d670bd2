"""Where a figure was measured: stored beside every result."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions and hardware; on a GPU, whether cuDNN chooses algorithms by time, so maybe others the next time."""
    device = torch.device(device)
    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
    return found | ({"cudnn_benchmark": torch.backends.cudnn.benchmark} if device.type == "cuda" else {})
