"""Triton kernels for batch norm with ReLU: two forward, two backward, on images with channels last as (M, C).

The first kernel of each pair reduces parts of the rows and writes partial results of shape (parts, C). Every program of
the second kernel combines the partial results of its channels and then processes its rows. The shape determines the
order of all summations, and there are no atomics, so the same input gives the same bits. Importing this file requires
Triton.
"""

import triton
import triton.language as tl

# Small tensors, whose alignment varies. A kernel must not be compiled again for another alignment, perhaps during the
# capture of a CUDA graph.
PER_CHANNEL = ["weight", "bias", "dweight", "dbias", "moments", "running_mean", "running_var", "tracked", "offset"]


@triton.jit
def _load(x, rows, cols, end, C):
    """Load a tile in its own dtype, with zeros beyond row `end` and channel C."""
    inside = (rows[:, None] < end) & (cols[None, :] < C)
    return tl.load(x + rows[:, None] * C + cols[None, :], mask=inside, other=0.0)


@triton.jit
def _load_channels(x, cols, C):
    """Load one value per channel, as float32."""
    return tl.load(x + cols, mask=cols < C, other=0.0).to(tl.float32)


@triton.jit
def _load_parts(x, cols, parts, C, PARTS: tl.constexpr):
    """Load the partial results of all parts for these channels, with zeros beyond the last part."""
    return _load(x, tl.arange(0, PARTS), cols, parts, C)


@triton.jit
def _normalised(x, mean, invstd, weight, bias):
    """Compute the norm's output before ReLU, in float32.

    The backward pass recomputes the sign of an output with this function, so it must round in the same way everywhere.
    It leaves the compiler no choice: the multiplication with addition is an explicit `fma`, and the subtracted mean is
    not a product (see `normalise`).
    """
    return tl.fma(x.to(tl.float32) - mean[None, :], (invstd * weight)[None, :], bias[None, :])


@triton.jit
def batch_statistics(x, partials, M, C, rows, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """Write mean and sum of squared deviations of each channel over `rows` rows into `partials` (2, parts, C).

    Each row of a tile accumulates every BLOCK_M-th row with Welford's update; Chan's formula combines them. Values and
    means are relative to the very first row, so no precision is lost if a mean is much larger than the deviations.
    """
    part = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    offsets = tl.arange(0, BLOCK_M)
    start = part * rows
    end = tl.minimum(start + rows, M)
    origin = _load_channels(x, cols, C)
    mean = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    m2 = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    next_x = _load(x, start + offsets, cols, end, C)
    count = 0.0
    for row in range(start, end, BLOCK_M):
        tile = next_x.to(tl.float32) - origin[None, :]
        next_x = _load(x, row + BLOCK_M + offsets, cols, end, C)  # loads while this tile is processed
        count += 1.0
        delta = tl.where((row + offsets < end)[:, None], tile - mean, 0.0)
        mean += delta * (1.0 / count)
        m2 += delta * (tile - mean)
    n = tl.maximum((end - start - offsets + BLOCK_M - 1) // BLOCK_M, 0).to(tl.float32)[:, None]
    joint_mean = tl.sum(mean * n, axis=0) / (end - start)
    distance = mean - joint_mean[None, :]
    deviations = tl.sum(m2 + n * distance * distance, axis=0)
    inside = cols < C
    at = partials + part * C + cols
    tl.store(at, joint_mean, mask=inside)
    tl.store(at + tl.num_programs(0) * C, deviations, mask=inside)


@triton.jit(do_not_specialize_on_alignment=PER_CHANNEL)
def normalise(
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
    M,
    C,
    parts,
    part_rows,
    rows,
    PARTS: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write normalised rows into `y`; programs of the first rows also write `moments` (2, C) and running statistics.

    `added` is added before ReLU. `offset` is a value per channel that x lacks but that belongs to the running mean. All
    of `added`, `running_mean`, `running_var`, `tracked` and `offset` may be None.
    """
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = cols < C
    offsets = tl.arange(0, BLOCK_M)
    start = tl.program_id(0) * rows
    end = tl.minimum(start + rows, M)
    next_x = _load(x, start + offsets, cols, end, C)  # loads while parts are combined
    n = tl.maximum(tl.minimum(M - tl.arange(0, PARTS) * part_rows, part_rows), 0).to(tl.float32)[:, None]
    means = _load_parts(partials, cols, parts, C, PARTS)
    deviations = _load_parts(partials + parts * C, cols, parts, C, PARTS)
    relative = tl.sum(means * n, axis=0) / M
    distance = means - relative[None, :]
    m2 = tl.sum(deviations + n * distance * distance, axis=0)
    mean = relative + _load_channels(x, cols, C)  # a sum, which the compiler cannot fuse with `x - mean`
    invstd = tl.rsqrt(m2 / M + eps)
    w = _load_channels(weight, cols, C)
    b = _load_channels(bias, cols, C)
    if tl.program_id(0) == 0:
        tl.store(moments + cols, mean, mask=inside)
        tl.store(moments + C + cols, invstd, mask=inside)
        if running_mean is not None:
            batch_mean = mean
            if offset is not None:
                batch_mean += _load_channels(offset, cols, C)
            running = _load_channels(running_mean, cols, C)
            tl.store(running_mean + cols, (1 - momentum) * running + momentum * batch_mean, mask=inside)
        if running_var is not None:
            running = _load_channels(running_var, cols, C)
            tl.store(running_var + cols, (1 - momentum) * running + momentum * (m2 / (M - 1)), mask=inside)
        if tracked is not None:
            tl.store(tracked, tl.load(tracked) + 1, mask=tl.program_id(1) == 0)
    for row in range(start, end, BLOCK_M):
        tile = next_x
        next_x = _load(x, row + BLOCK_M + offsets, cols, end, C)
        out = _normalised(tile, mean, invstd, w, b)
        if added is not None:
            out += _load(added, row + offsets, cols, end, C).to(tl.float32)
        if RELU:
            out = tl.where(out <= 0, 0.0, out)  # keeps NaN
        at = (row + offsets)[:, None] * C + cols[None, :]
        tl.store(y + at, out, mask=(row + offsets < end)[:, None] & inside[None, :])


@triton.jit
def _relu_backward(dy, x, mean, invstd, weight, bias, RELU: tl.constexpr):
    """Return the gradient of ReLU's input in float32: zero where its output was, even if that underflowed to zero."""
    gradient = dy.to(tl.float32)
    if RELU:
        rounded = _normalised(x, mean, invstd, weight, bias).to(x.dtype)
        gradient = tl.where(rounded <= 0, 0.0, gradient)
    return gradient


@triton.jit(do_not_specialize_on_alignment=PER_CHANNEL)
def gradient_sums(
    dy,
    x,
    y,
    dsum,
    moments,
    weight,
    bias,
    partials,
    M,
    C,
    rows,
    RELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write the sums of dy and of dy · x̂ for each channel over `rows` rows into `partials` (2, parts, C).

    If something was added before ReLU, x does not determine the sign of the output. Then the kernel reads the output
    `y` and writes the gradient of the sum into `dsum`. Otherwise both are None.
    """
    part = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    offsets = tl.arange(0, BLOCK_M)
    start = part * rows
    end = tl.minimum(start + rows, M)
    mean = _load_channels(moments, cols, C)
    invstd = _load_channels(moments + C, cols, C)
    w = _load_channels(weight, cols, C)
    b = _load_channels(bias, cols, C)
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    total_xhat = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    next_x = _load(x, start + offsets, cols, end, C)
    next_dy = _load(dy, start + offsets, cols, end, C)  # zero beyond the end
    for row in range(start, end, BLOCK_M):
        tile = next_x
        if y is not None:
            inactive = _load(y, row + offsets, cols, end, C) <= 0
            gradient = tl.where(inactive, 0.0, next_dy.to(tl.float32))
            at = (row + offsets)[:, None] * C + cols[None, :]
            tl.store(dsum + at, gradient, mask=(row + offsets < end)[:, None] & (cols < C)[None, :])
        else:
            gradient = _relu_backward(next_dy, tile, mean, invstd, w, b, RELU)
        next_x = _load(x, row + BLOCK_M + offsets, cols, end, C)
        next_dy = _load(dy, row + BLOCK_M + offsets, cols, end, C)
        total += gradient
        total_xhat += gradient * (tile.to(tl.float32) - mean[None, :])
    inside = cols < C
    at = partials + part * C + cols
    tl.store(at, tl.sum(total, axis=0), mask=inside)
    tl.store(at + tl.num_programs(0) * C, tl.sum(total_xhat, axis=0) * invstd, mask=inside)


@triton.jit(do_not_specialize_on_alignment=PER_CHANNEL)
def input_gradient(
    dy,
    x,
    dx,
    partials,
    moments,
    weight,
    bias,
    dweight,
    dbias,
    M,
    C,
    parts,
    rows,
    PARTS: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write dL/dx = w / σ · (dy - mean(dy) - x̂ · mean(dy · x̂)); programs of the first rows also write dL/dw, dL/db."""
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = cols < C
    offsets = tl.arange(0, BLOCK_M)
    start = tl.program_id(0) * rows
    end = tl.minimum(start + rows, M)
    next_x = _load(x, start + offsets, cols, end, C)
    next_dy = _load(dy, start + offsets, cols, end, C)
    total = tl.sum(_load_parts(partials, cols, parts, C, PARTS), axis=0)
    total_xhat = tl.sum(_load_parts(partials + parts * C, cols, parts, C, PARTS), axis=0)
    mean = _load_channels(moments, cols, C)
    invstd = _load_channels(moments + C, cols, C)
    w = _load_channels(weight, cols, C)
    b = _load_channels(bias, cols, C)
    if tl.program_id(0) == 0:
        tl.store(dbias + cols, total, mask=inside)
        tl.store(dweight + cols, total_xhat, mask=inside)
    mean_dy = (total / M)[None, :]
    slope = (total_xhat / M * invstd)[None, :]
    scale = (w * invstd)[None, :]
    for row in range(start, end, BLOCK_M):
        tile = next_x
        gradient = _relu_backward(next_dy, tile, mean, invstd, w, b, RELU)
        next_x = _load(x, row + BLOCK_M + offsets, cols, end, C)
        next_dy = _load(dy, row + BLOCK_M + offsets, cols, end, C)
        out = scale * (gradient - mean_dy - (tile.to(tl.float32) - mean[None, :]) * slope)
        at = (row + offsets)[:, None] * C + cols[None, :]
        tl.store(dx + at, out, mask=(row + offsets < end)[:, None] & inside[None, :])
