"""Fast versions of frequent operations on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_DTYPES = (torch.float32, torch.float64)


class FastMetaOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, frequent operations on meta tensors only make their outputs.

    PyTorch takes milliseconds for a batch norm on the meta device, because it goes through each of the operations that
    the batch norm consists of. Whatever is not among the frequent cases is left to PyTorch.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outputs = _KNOWN.get(func)
        found = None if outputs is None else outputs(*args)
        return func(*args, **(kwargs or {})) if found is None else found


def _is_plain(*tensors: Any) -> bool:
    """Whether all are contiguous tensors on the meta device, of the same usual dtype."""
    return all(
        isinstance(x, Tensor) and x.is_meta and x.is_contiguous() and x.dtype in _DTYPES and x.dtype == tensors[0].dtype
        for x in tensors
    )


def _elementwise(*tensors: Any) -> Tensor | None:
    if _is_plain(*tensors) and all(x.shape == tensors[0].shape for x in tensors):
        return torch.empty_like(tensors[0])
    return None


def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...] | None:
    given = (t for t in (weight, bias, mean, variance) if t is not None)
    if not training or x.dim() < 2 or not _is_plain(x, *given):
        return None
    return torch.empty_like(x), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


def _batch_norm_backward(
    gradient: Tensor, x: Tensor, weight: Any, mean: Any, variance: Any, saved_mean: Any, saved: Any, training: bool,
    eps: float, wanted: Sequence[bool],
) -> tuple[Tensor | None, ...] | None:  # fmt: skip
    if not training or x.dim() < 2 or not _is_plain(gradient, x, weight):
        return None
    made = torch.empty_like(x), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
    return tuple(output if asked else None for output, asked in zip(made, wanted, strict=True))


_ATEN = torch.ops.aten
_KNOWN: dict[Any, Callable[..., Any]] = {
    _ATEN.native_batch_norm.default: _batch_norm,
    _ATEN.native_batch_norm_backward.default: _batch_norm_backward,
    _ATEN.relu.default: _elementwise,
    _ATEN.threshold_backward.default: lambda gradient, x, threshold: _elementwise(gradient, x),
    _ATEN.add.Tensor: _elementwise,
    _ATEN.sub.Tensor: _elementwise,
    _ATEN.mul.Tensor: _elementwise,
}
