"""Streams: the tuple of tensors that flows between layers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

T = TypeVar("T")

_LOW = (torch.float16, torch.bfloat16)

Streams = tuple[Tensor, ...]
"""One tensor, or the two streams of a reversible segment followed by their companions."""

Gradients = tuple[Tensor | None, ...]
"""A gradient for each stream; None stands for zero."""


def as_streams(output: Tensor | Streams) -> Streams:
    """Return a layer's output as a tuple; raise `ValueError` if it contains anything but tensors."""
    if isinstance(output, Tensor):
        return (output,)
    found = type(output).__name__
    if isinstance(output, tuple | list):
        others = [type(x).__name__ for x in output if not isinstance(x, Tensor)]
        if not others:
            return tuple(output)
        found = f"{found} with a {others[0]} in it"  # an LSTM returns one, for example
    raise ValueError(f"found a {found} where streams should be: give a tensor, or a tuple of tensors only")


def widened(streams: Streams) -> Streams:
    """Return the streams in float32 if autocast is enabled, otherwise unchanged.

    Streams accumulate sums over many layers, and reversible layers subtract again what they added. Both need the
    precision of float32; residual functions do not.
    """
    if not streams or autocast_dtype(streams[0].device) is None:
        return streams
    return tuple(x.float() if x.dtype in _LOW else x for x in streams)


def narrowed(x: Tensor) -> Tensor:
    """Return the tensor in the autocast dtype if autocast is enabled, otherwise unchanged.

    It is for layers that add in the autocast dtype, as ordinary ResNets do. A layer that calls it exactly once for each
    of its inputs, and uses the inputs in no other way, may set the attribute `narrows = True`. The outputs of the layer
    below are then not widened first, which saves two casts and changes no result. With a second call, gradients would
    be summed in the autocast dtype instead of float32.
    """
    dtype = autocast_dtype(x.device)
    return x.to(dtype) if dtype is not None and x.dtype in (torch.float32, *_LOW) else x


def single(streams: tuple[T, ...]) -> T | tuple[T, ...]:
    """Return the only stream itself, or the tuple if there are several."""
    return streams[0] if len(streams) == 1 else streams


def differentiable(x: Tensor) -> bool:
    """Return whether tensors of this dtype can have gradients."""
    return x.is_floating_point() or x.is_complex()


def leaves(streams: Streams) -> Streams:
    """Return the same values as leaves of a new graph."""
    return tuple(x.detach().requires_grad_(differentiable(x)) for x in streams)


def with_layout(x: Tensor, last: bool) -> Tensor:
    """Return the tensor in dense memory, images with channels `last`, with the canonical strides of that layout.

    Kernels are chosen by strides, including those of dimensions of size 1, and their results differ in the last bits.
    """
    if not (last and x.ndim == 4):
        found, strides = x.contiguous(), [prod(max(n, 1) for n in x.shape[i + 1 :]) for i in range(x.ndim)]
    else:
        found, (_, c, h, w) = x.contiguous(memory_format=torch.channels_last), x.shape
        strides = [h * w * c, 1, w * c, c]
    return found if list(found.stride()) == strides else found.as_strided(found.shape, strides)


def channels_last(x: Tensor) -> bool:
    """Return whether images are stored with channels last, and in no layout that is contiguous as well."""
    return x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def laid_out_like(x: Tensor, other: Tensor) -> Tensor:
    """Return `x` with the memory layout of `other`, which has the same shape; fused optimizers require it."""
    if all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), other.stride(), strict=True)):
        return x
    return torch.empty_like(other, dtype=x.dtype, device=x.device).copy_(x)


def plain_parts(x: Tensor) -> list[Tensor]:
    """Return the tensor, or the plain tensors inside one that has none of its own memory, such as 8-bit moments."""
    if not is_traceable_wrapper_subclass(x):
        return [x]
    names, _ = x.__tensor_flatten__()
    return [part for name in names for part in plain_parts(getattr(x, name))]


def copied(x: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Return a copy, on the same device or on another one; subclasses may not copy for `x.to(device, copy=True)`."""
    if not is_traceable_wrapper_subclass(x):
        return x.to(device or x.device, copy=True)
    names, others = x.__tensor_flatten__()
    parts = {name: copied(getattr(x, name), device) for name in names}
    return type(x).__tensor_unflatten__(parts, others, x.shape, x.stride())


def storage_id(tensor: Tensor) -> int:
    """Return an identifier of the tensor's storage, unique on every device including "meta"."""
    return int(tensor.untyped_storage()._cdata)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of the autocast that is currently enabled for `device`, or None."""
    if device.type == "meta":
        return None
    # The compiler of older PyTorch versions does not support `is_autocast_available`, and sees supported devices only.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device.type)
    if known and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def autocasting(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return a context with autocast to `dtype`, or without autocast if it is None, whatever is enabled outside.

    Cast weights are not cached: a cache would outlive an update or a change of weights, and grow with depth.
    """
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)
