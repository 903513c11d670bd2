"""Streams: the tuple of tensors that flows between layers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_LOW = (torch.float16, torch.bfloat16)

Streams = tuple[Tensor, ...]
"""One tensor, or two in a reversible run and their companions."""

Gradients = tuple[Tensor | None, ...]
"""A gradient for each stream; None stands for zero."""


def as_streams(output: Tensor | Streams) -> Streams:
    """A layer's output as a tuple."""
    if isinstance(output, Tensor):
        return (output,)
    found = type(output).__name__
    if isinstance(output, tuple | list):
        others = [type(x).__name__ for x in output if not isinstance(x, Tensor)]
        if not others:
            return tuple(output)
        found = f"{found} with a {others[0]} in it"  # as an LSTM gives one
    raise ValueError(f"found a {found} where streams should be: give a tensor, or a tuple of tensors alone")


def widened(streams: Streams) -> Streams:
    """Under autocast, the streams in float32.

    They are added to over many layers, and reversible layers subtract again what they added: both need the precision,
    while residual functions can do with less.
    """
    if not streams or autocast_dtype(streams[0].device) is None:
        return streams
    return tuple(x.float() if x.dtype in _LOW else x for x in streams)


def narrowed(x: Tensor) -> Tensor:
    """Under autocast, the tensor in its dtype: for layers that want their sums in it, as ResNets have them elsewhere.

    Those that take their inputs by this and nothing else say so with an attribute ``narrows``, which is true. What a
    layer below gives them in that dtype is not widened first, which would make no difference but take time: not as long
    as this is called once for each input, or gradients would be added up in float32 there and in that dtype here.
    """
    dtype = autocast_dtype(x.device)
    return x.to(dtype) if dtype is not None and x.dtype in (torch.float32, *_LOW) else x


def single(streams: tuple[T, ...]) -> T | tuple[T, ...]:
    """The stream itself if there is but one."""
    return streams[0] if len(streams) == 1 else streams


def differentiable(x: Tensor) -> bool:
    """Whether there are gradients of tensors like this one."""
    return x.is_floating_point() or x.is_complex()


def leaves(streams: Streams) -> Streams:
    """The same values as the start of a new graph."""
    return tuple(x.detach().requires_grad_(differentiable(x)) for x in streams)


def ordered(x: Tensor, last: bool) -> Tensor:
    """The tensor without gaps, in the order of its dimensions, of images with channels ``last``; to the last stride.

    Kernels choose by strides, also by those of dimensions of size 1, and their results differ in the last bits.
    """
    if not (last and x.ndim == 4):
        found, strides = x.contiguous(), [prod(max(n, 1) for n in x.shape[i + 1 :]) for i in range(x.ndim)]
    else:
        found, (_, c, h, w) = x.contiguous(memory_format=torch.channels_last), x.shape
        strides = [h * w * c, 1, w * c, c]
    return found if list(found.stride()) == strides else found.as_strided(found.shape, strides)


def channels_last(x: Tensor) -> bool:
    """Whether the channels of images lie together in memory; not where that is the ordinary layout too."""
    return x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def laid_out_like(x: Tensor, other: Tensor) -> Tensor:
    """``x`` in memory as ``other`` is, which has the same shape: fused optimizers take for granted that it is."""
    if all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), other.stride(), strict=True)):
        return x
    return torch.empty_like(other, dtype=x.dtype, device=x.device).copy_(x)


def storage_id(tensor: Tensor) -> int:
    """Which memory a tensor lies in; tells storages apart on every device, also on "meta"."""
    return int(tensor.untyped_storage()._cdata)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of the autocast that is on for ``device`` now, if any."""
    if device.type == "meta":
        return None
    # Compilers of older PyTorch do not know the second question, and see no other devices that it is asked for.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device.type)
    if known and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def autocasting(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast to ``dtype``, or none at all, whatever is on outside.

    Cast weights are not cached: a cache would outlive an update or a change of weights, and grow with depth.
    """
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)
