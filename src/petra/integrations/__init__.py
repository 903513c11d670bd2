"""Petra together with the tools of the field. Each module needs its own packages, which are imported on first use.

- `lightning.py`: `PetraModule`, a `LightningModule` that trains with any method of Petra.
- `huggingface.py`: `NetworkWithLoss`, which the `Trainer` of Hugging Face and Accelerate can train.
- `export.py`: weights as safetensors or as a distributed checkpoint; programs for `torch.export` and ONNX.
- `checkpoint_export.py`: a checkpoint of a run, with its optimizer, as a distributed checkpoint.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from petra.integrations.checkpoint_export import export_checkpoint
    from petra.integrations.export import export_onnx, export_program, save_distributed, save_safetensors
    from petra.integrations.huggingface import NetworkWithLoss

__all__ = [
    "NetworkWithLoss",
    "export_checkpoint",
    "export_onnx",
    "export_program",
    "save_distributed",
    "save_safetensors",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = {"NetworkWithLoss": "huggingface", "export_checkpoint": "checkpoint_export"}
    module = modules.get(name, "export")
    return getattr(import_module(f"{__name__}.{module}"), name)
