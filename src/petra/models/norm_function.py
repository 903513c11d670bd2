"""Batch norm with an addition and ReLU in training mode as functions of autograd, on the kernels of `norm_kernels`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Statistics = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Running mean, running variance and the number of batches in them."""

WARPS = 4
TILE = 4096
"""Values that a program works on at a time: 32 for each of its 128 threads."""
NARROWEST, WIDEST = 16, 32
"""Channels of a tile: 16 are 32 bytes in bfloat16, the least that is read at once.

In between, a quarter of the image's: with fewer, more programs share the rows, and each has less to read of the parts.
"""
MOST_PARTS = 64
"""Each program of a second kernel reads all parts of its channels, which must not take longer than its own rows.

At 64 parts of 32 channels that is 16 KB, as much as a tile in float32.
"""
PROGRAMS = 256
"""Programs of a kernel on large images, a few for each processor of a large GPU.

A constant, as all of these are, so that sums do not depend on the GPU.
"""


class Tiling(NamedTuple):
    """How (M, C) is cut. Rows are those of a program, ``part_rows`` in a first kernel and ``rows`` in a second one."""

    block_m: int
    block_c: int
    column_blocks: int
    parts: int
    part_rows: int
    row_blocks: int
    rows: int


def tiling(m: int, c: int) -> Tiling:
    """By rule and not by trial, since a recording must not be disturbed by trials."""
    power = _power_of_two(c)
    block_c = min(power, max(NARROWEST, min(WIDEST, power // 4)))
    block_m = TILE // block_c
    column_blocks = -(-c // block_c)
    share = max(1, PROGRAMS // column_blocks)
    parts, part_rows = _shared(m, block_m, min(share, MOST_PARTS))
    row_blocks, rows = _shared(m, block_m, share)
    return Tiling(block_m, block_c, column_blocks, parts, part_rows, row_blocks, rows)


def _shared(m: int, block_m: int, most: int) -> tuple[int, int]:
    """Programs for m rows, ``most`` or fewer, and the rows of each in whole tiles."""
    tiles = -(-m // block_m)
    rows = -(-tiles // most) * block_m
    return -(-m // rows), rows


def _power_of_two(n: int) -> int:
    """The smallest that is not below n."""
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
    """relu(batch_norm(x) + added) of images with channels last, with the statistics of the batch.

    Running statistics are updated as by `torch.nn.BatchNorm2d`, with ``offset`` added to the mean. ``added`` is like x,
    and only for ``relu``.
    """
    if offset is not None:  # or there would be one more kernel to compile where there are no statistics
        offset = None if statistics[0] is None else offset.detach()
    arguments = (*statistics, offset, float(momentum), eps, relu)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias, added)):
        if added is not None:
            return _NormAddRelu.apply(x, added, weight, bias, *arguments)  # type: ignore[no-untyped-call, no-any-return]
        return _NormRelu.apply(x, weight, bias, *arguments)  # type: ignore[no-untyped-call, no-any-return]
    return _forward(x, added, weight, bias, *arguments)[0]


class _NormRelu(torch.autograd.Function):
    """Keeps x and not y, whose sign is found again from it, so a y that nobody else keeps is given back."""

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
    """Keeps x and y, which the next layer keeps anyway, and not what was added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor, weight: Tensor, bias: Tensor, *arguments: Any) -> Tensor:
        y, moments = _forward(x, added, weight, bias, *arguments)
        ctx.save_for_backward(x, y, weight, bias, moments)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, moments = ctx.saved_tensors
        felt, dx, dweight, dbias = _backward(dy, x, y, weight, bias, moments, relu=True)
        return dx, felt, dweight, dbias, *[None] * 7


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
    """The output, and mean and 1 / σ of the batch."""
    from petra.models import norm_kernels as kernels

    c = x.shape[1]
    m = x.numel() // c
    t = tiling(m, c)
    y = torch.empty_like(x)
    found = x.new_empty((2, t.parts, c), dtype=torch.float32)
    moments = x.new_empty((2, c), dtype=torch.float32)
    blocks = {"BLOCK_M": t.block_m, "BLOCK_C": t.block_c, "num_warps": WARPS}
    with torch.cuda.device(x.get_device()):
        kernels.measure[t.parts, t.column_blocks](x, found, m, c, t.part_rows, **blocks)
        kernels.apply[t.row_blocks, t.column_blocks](
            x,
            added,
            y,
            found,
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
    """The gradients of what was added, x, weight and bias; without ``y`` nothing was."""
    from petra.models import norm_kernels as kernels

    dy = dy.contiguous(memory_format=torch.channels_last)
    c = x.shape[1]
    m = x.numel() // c
    t = tiling(m, c)
    dx = torch.empty_like(x)
    felt = dy if y is None else torch.empty_like(dy)
    found = x.new_empty((2, t.parts, c), dtype=torch.float32)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
    blocks = {"BLOCK_M": t.block_m, "BLOCK_C": t.block_c, "num_warps": WARPS}
    with torch.cuda.device(x.get_device()):
        kernels.gather[t.parts, t.column_blocks](
            dy,
            x,
            y,
            None if y is None else felt,
            moments,
            weight,
            bias,
            found,
            m,
            c,
            t.part_rows,
            RELU=relu,
            **blocks,
        )
        kernels.spread[t.row_blocks, t.column_blocks](
            felt,
            x,
            dx,
            found,
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
    return felt, dx, dweight, dbias
