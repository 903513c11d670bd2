"""Training-mode batch norm with an addition and ReLU, as autograd functions on the kernels of `triton_batch_norm.py`.

`tiling` decides how the kernels divide their work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Statistics = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Running mean, running variance and the number of batches that they were computed from."""

WARPS = 4
TILE = 4096
"""The values that a program processes at a time: 32 for each of its 128 threads."""
MIN_BLOCK_C, MAX_BLOCK_C = 16, 32
"""The limits for the channels of a tile: 16 channels are 32 bytes in bfloat16, the smallest memory transaction.

Between the limits it is a quarter of the image's channels. With fewer channels per tile, more programs share the rows,
and each has fewer partial results to read.
"""
MAX_PARTS = 64
"""The limit for the number of parts.

Each program of a second kernel reads the partial results of all parts for its channels, which must not take longer than
reading its own rows. 64 parts of 32 channels are 16 KB, as much as a tile in float32.
"""
PROGRAMS = 256
"""The number of programs of a kernel on large images, a few for each multiprocessor of a large GPU.

Like the other sizes it is a constant, so that sums do not depend on the GPU.
"""


class Tiling(NamedTuple):
    """How kernels divide (M, C) into tiles and programs.

    The first kernel of a pair divides the rows into `parts`, the second one into `row_blocks`.
    """

    block_m: int
    """The rows of a tile."""
    block_c: int
    """The channels of a tile."""
    column_blocks: int
    """The number of programs along the channels."""
    parts: int
    """The number of programs along the rows, in the first kernel."""
    part_rows: int
    """The rows of each program, in the first kernel."""
    row_blocks: int
    """The number of programs along the rows, in the second kernel."""
    rows: int
    """The rows of each program, in the second kernel."""


def tiling(m: int, c: int) -> Tiling:
    """Choose a tiling by rule, not by autotuning, whose trials would disturb the capture of a CUDA graph."""
    power = _power_of_two(c)
    block_c = min(power, max(MIN_BLOCK_C, min(MAX_BLOCK_C, power // 4)))
    block_m = TILE // block_c
    column_blocks = -(-c // block_c)
    share = max(1, PROGRAMS // column_blocks)
    parts, part_rows = _divided(m, block_m, min(share, MAX_PARTS))
    row_blocks, rows = _divided(m, block_m, share)
    return Tiling(block_m, block_c, column_blocks, parts, part_rows, row_blocks, rows)


def _divided(m: int, block_m: int, most: int) -> tuple[int, int]:
    """Return the number of programs for m rows, `most` or fewer, and the rows of each in whole tiles."""
    tiles = -(-m // block_m)
    rows = -(-tiles // most) * block_m
    return -(-m // rows), rows


def _power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def batch_norm_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Statistics,
    momentum: float,
    eps: float,
    relu: bool,
    offset: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """Compute relu(batch_norm(x) + added) for images with channels last, with batch statistics.

    Updates running statistics as `torch.nn.BatchNorm2d` does, with `offset` added to the mean. `added` has the shape,
    dtype and layout of x, and requires `relu`.
    """
    if offset is not None:  # avoids one more kernel to compile if there are no statistics
        offset = None if statistics[0] is None else offset.detach()
    arguments = (*statistics, offset, float(momentum), eps, relu)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias, added)):
        if added is not None:
            return _NormAddRelu.apply(x, added, weight, bias, *arguments)  # type: ignore[no-untyped-call, no-any-return]
        return _NormRelu.apply(x, weight, bias, *arguments)  # type: ignore[no-untyped-call, no-any-return]
    return _forward(x, added, weight, bias, *arguments)[0]


class _NormRelu(torch.autograd.Function):
    """Saves x but not y, whose sign it computes again from x, so that the memory of y can be freed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *arguments: Any) -> Tensor:
        y, moments = _forward(x, None, weight, bias, *arguments)
        ctx.save_for_backward(x, weight, bias, moments)
        ctx.relu = arguments[-1]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, moments = ctx.saved_tensors
        return *_backward(dy, x, None, weight, bias, moments, ctx.relu)[1:], *[None] * 7


class _NormAddRelu(torch.autograd.Function):
    """Saves x, and y, which the next layer saves anyway, but not `added`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor, weight: Tensor, bias: Tensor, *arguments: Any) -> Tensor:
        y, moments = _forward(x, added, weight, bias, *arguments)
        ctx.save_for_backward(x, y, weight, bias, moments)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, moments = ctx.saved_tensors
        dsum, dx, dweight, dbias = _backward(dy, x, y, weight, bias, moments, relu=True)
        return dx, dsum, dweight, dbias, *[None] * 7


def _forward(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    tracked: Tensor | None,
    offset: Tensor | None,
    momentum: float,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output, and mean and 1 / σ of the batch."""
    from petra.kernels import triton_batch_norm as kernels

    c = x.shape[1]
    m = x.numel() // c
    t = tiling(m, c)
    y = torch.empty_like(x)
    partials = x.new_empty((2, t.parts, c), dtype=torch.float32)
    moments = x.new_empty((2, c), dtype=torch.float32)
    blocks = {"BLOCK_M": t.block_m, "BLOCK_C": t.block_c, "num_warps": WARPS}
    with torch.cuda.device(x.get_device()):
        kernels.batch_statistics[t.parts, t.column_blocks](x, partials, m, c, t.part_rows, **blocks)
        kernels.normalise[t.row_blocks, t.column_blocks](
            x,
            added,
            y,
            partials,
            weight,
            bias,
            moments,
            running_mean,
            running_var,
            tracked,
            offset,
            momentum,
            eps,
            m,
            c,
            t.parts,
            t.part_rows,
            t.rows,
            PARTS=_power_of_two(t.parts),
            RELU=relu,
            **blocks,
        )
    return y, moments


def _backward(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, moments: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `added`, x, weight and bias; y is None if nothing was added."""
    from petra.kernels import triton_batch_norm as kernels

    dy = dy.contiguous(memory_format=torch.channels_last)
    c = x.shape[1]
    m = x.numel() // c
    t = tiling(m, c)
    dx = torch.empty_like(x)
    dsum = dy if y is None else torch.empty_like(dy)
    partials = x.new_empty((2, t.parts, c), dtype=torch.float32)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
    blocks = {"BLOCK_M": t.block_m, "BLOCK_C": t.block_c, "num_warps": WARPS}
    with torch.cuda.device(x.get_device()):
        kernels.gradient_sums[t.parts, t.column_blocks](
            dy,
            x,
            y,
            None if y is None else dsum,
            moments,
            weight,
            bias,
            partials,
            m,
            c,
            t.part_rows,
            RELU=relu,
            **blocks,
        )
        kernels.input_gradient[t.row_blocks, t.column_blocks](
            dsum,
            x,
            dx,
            partials,
            moments,
            weight,
            bias,
            dweight,
            dbias,
            m,
            c,
            t.parts,
            t.rows,
            PARTS=_power_of_two(t.parts),
            RELU=relu and y is None,
            **blocks,
        )
    return dsum, dx, dweight, dbias
