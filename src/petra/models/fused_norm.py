"""Batch norm with what follows, a sum and ReLU, as two kernels forward and two backward; or PyTorch's own ones.

They apply in training mode on a GPU, to images with channels last in float32, bfloat16 or float16. PyTorch takes five
kernels forward and three backward there, which go over the images more often. Set the environment variable
PETRA_FUSED_NORM to 0 to do without them.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from petra.models.norm_function import batch_norm_relu

ENABLED = os.environ.get("PETRA_FUSED_NORM", "1") != "0"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def norm_relu(
    norm: nn.Module,
    x: Tensor,
    relu: nn.Module | None = None,
    offset: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """relu(added + norm(x)), without what is None.

    ``offset`` is what x lacks of each channel: batch statistics take it away, and the running mean has it nevertheless.
    It is for batch norms in training mode, with a momentum below 1.
    """
    if _applies(norm, x, relu, added):
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.momentum is not None
        tracking = norm.track_running_stats
        return batch_norm_relu(
            x,
            norm.weight,
            norm.bias,
            (norm.running_mean, norm.running_var, norm.num_batches_tracked) if tracking else (None, None, None),
            norm.momentum,
            norm.eps,
            relu is not None,
            offset,
            added,
        )
    if offset is not None:
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.momentum is not None
        if norm.running_mean is not None:  # of which the norm is about to keep a part of 1 - momentum
            # Through `data`, for autograd takes no notice of what a norm does to it either: graphs may have saved it.
            norm.running_mean.data.add_(offset.detach(), alpha=norm.momentum / (1 - norm.momentum))
    x = norm(x)
    x = x if added is None else added + x
    return x if relu is None else relu(x)


def _applies(norm: nn.Module, x: Tensor, relu: nn.Module | None, added: Tensor | None) -> bool:
    """Whether the kernels do what the modules would do."""
    if torch.compiler.is_compiling() or not ENABLED or not _on_gpu(x):  # a compiler fuses them by itself
        return False
    return (
        type(norm) is nn.BatchNorm2d  # not one that does more
        and (relu is None or type(relu) is nn.ReLU)
        and norm.training
        and norm.momentum is not None
        and not any(map(hooked, (norm, *(() if relu is None else (relu,)))))
        and _suits(x, norm.num_features)
        and (added is None or (relu is not None and _alike(added, x) and _suits(added, norm.num_features)))
        and all(t is not None and t.dtype == torch.float32 and t.device == x.device for t in (norm.weight, norm.bias))
        and all(t is None or t.dtype == torch.float32 for t in (norm.running_mean, norm.running_var))
        and _has_triton()
    )


def _suits(x: Tensor, channels: int) -> bool:
    """Whether x is images that the kernels can read; what is no batch is left to PyTorch, which says so."""
    return (
        type(x) is Tensor
        and x.ndim == 4
        and x.dtype in _DTYPES
        and x.shape[1] == channels > 1
        and channels < x.numel() < 2**30  # more than one row, and places are counted in 32 bits
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def _alike(added: Tensor, x: Tensor) -> bool:
    return added.shape == x.shape and added.dtype == x.dtype and added.device == x.device


def hooked(module: nn.Module) -> bool:
    """Whether somebody wants to be called when the module is."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(own) or any(getattr(hooks, name) for name in _GLOBAL_HOOKS)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda and torch.version.hip is None  # the kernels were never run on GPUs of AMD


@cache
def _has_triton() -> bool:
    """It comes with PyTorch for GPUs on most systems; the kernels were never run with one before 3.6."""
    try:
        import triton
    except ImportError:
        return False
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (3, 6)
