"""Libraries that tests use where they are installed."""

import sys
import warnings
from importlib import import_module
from types import ModuleType

import pytest
import torch

_OPERATORS = ("nms", "qnms")
_DECLARED = []


def library(name: str) -> ModuleType:
    """Import a library, or skip the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name.partition(".")[0] in ("accelerate", "lightning", "timm", "torchvision", "transformers"):
            _declare_torchvision_operators()
        return pytest.importorskip(name, exc_type=ImportError)


def _declare_torchvision_operators() -> None:
    """Declare the operators of torchvision that are missing beside a CPU build of PyTorch; nothing here calls them."""
    try:
        import_module("torchvision")
    except ImportError:
        return
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for module in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
            del sys.modules[module]
        declared = torch.library.Library("torchvision", "DEF")
        for operator in _OPERATORS:
            declared.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(declared)  # the declarations end with this object
