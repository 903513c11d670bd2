"""Batch norm with the addition and ReLU that follow it, as two kernels forward and two backward.

The kernels apply in training mode on a GPU, to images with channels last in float32, bfloat16 or float16. PyTorch needs
five kernels forward and three backward for the same, which read the images more often. In all other cases, and if the
environment variable PETRA_FUSED_NORM is 0, PyTorch's operations are used.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from petra.kernels.batch_norm_relu import batch_norm_relu

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
    """Compute relu(added + norm(x)); `relu` and `added` may be None.

    `offset` is a value per channel that was not added to x. It has no effect on the output, because the batch mean is
    subtracted, but it belongs to the running mean. It requires a batch norm in training mode with a momentum below 1.
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
        if norm.running_mean is not None:  # the norm is about to multiply it by 1 - momentum
            # Through `data`, because graphs may have saved it, and autograd ignores the norm's own updates as well.
            norm.running_mean.data.add_(offset.detach(), alpha=norm.momentum / (1 - norm.momentum))
    x = norm(x)
    x = x if added is None else added + x
    return x if relu is None else relu(x)


def _applies(norm: nn.Module, x: Tensor, relu: nn.Module | None, added: Tensor | None) -> bool:
    """Return whether the kernels compute what the modules would compute."""
    if torch.compiler.is_compiling() or not ENABLED or not _on_gpu(x):  # a compiler fuses them anyway
        return False
    return (
        type(norm) is nn.BatchNorm2d  # a derived class may do more
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
    """Return whether x is a batch of images that the kernels can read; for a single value PyTorch raises the error."""
    return (
        type(x) is Tensor
        and x.ndim == 4
        and x.dtype in _DTYPES
        and x.shape[1] == channels > 1
        and channels < x.numel() < 2**30  # more than one row, and 32-bit indices
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def _alike(added: Tensor, x: Tensor) -> bool:
    return added.shape == x.shape and added.dtype == x.dtype and added.device == x.device


def hooked(module: nn.Module) -> bool:
    """Return whether the module has hooks, its own or global ones."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(own) or any(getattr(hooks, name) for name in _GLOBAL_HOOKS)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda and torch.version.hip is None  # the kernels are not tested on AMD GPUs


@cache
def _has_triton() -> bool:
    """Return whether Triton is installed, in a version that the kernels are tested with."""
    try:
        import triton
    except ImportError:
        return False
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (3, 6)
