"""The Triton kernels of batch norm with ReLU: two forward, two backward, on images with channels last as (M, C).

Of each pair the first goes down a part of the rows and writes what it finds in it, a line of (parts, C); every program
of the second one puts the parts of its channels together and goes on to the rows. All orders of summation are fixed by
the shape, so there are no atomics and the same input gives the same bits. Importing this file needs Triton.
"""

import triton
import triton.language as tl

# Not to be compiled once more, maybe in the middle of a recording, when short ones lie elsewhere in memory.
SHORT = ["weight", "bias", "dweight", "dbias", "moments", "running_mean", "running_var", "tracked", "offset"]


@triton.jit
def _load(x, rows, cols, end, C):
    """A tile as it lies in memory, with zeros beyond row ``end`` and channel C."""
    inside = (rows[:, None] < end) & (cols[None, :] < C)
    return tl.load(x + rows[:, None] * C + cols[None, :], mask=inside, other=0.0)


@triton.jit
def _line(x, cols, C):
    """A value for each channel."""
    return tl.load(x + cols, mask=cols < C, other=0.0).to(tl.float32)


@triton.jit
def _parts(x, cols, parts, C, PARTS: tl.constexpr):
    """What the first kernel found for these channels in all parts, with zeros beyond the last one."""
    at = tl.arange(0, PARTS)
    return _load(x, at, cols, parts, C)


@triton.jit
def _normalised(x, mean, invstd, weight, bias):
    """The norm's output before ReLU, in float32.

    Backward finds the sign of an output again by this very function. Its roundings leave a compiler no choice: the
    multiplication that is added to is an ``fma`` already, and what is subtracted is no product (see `apply`).
    """
    return tl.fma(x.to(tl.float32) - mean[None, :], (invstd * weight)[None, :], bias[None, :])


@triton.jit
def measure(x, found, M, C, rows, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """Mean and sum of squared deviations of each channel over a part of ``rows`` rows, into ``found`` (2, parts, C).

    Every lane follows its own rows by Welford's update, and lanes are joined by Chan's formula. Values are taken
    relative to the first row of all, and so is the mean: nothing is lost if a mean is large and deviations are not.
    """
    part = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    lane = tl.arange(0, BLOCK_M)
    start = part * rows
    end = tl.minimum(start + rows, M)
    origin = _line(x, cols, C)
    mean = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    m2 = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    ahead = _load(x, start + lane, cols, end, C)
    count = 0.0
    for row in range(start, end, BLOCK_M):
        tile = ahead.to(tl.float32) - origin[None, :]
        ahead = _load(x, row + BLOCK_M + lane, cols, end, C)  # is on its way while this tile is worked on
        count += 1.0
        delta = tl.where((row + lane < end)[:, None], tile - mean, 0.0)
        mean += delta * (1.0 / count)
        m2 += delta * (tile - mean)
    n = tl.maximum((end - start - lane + BLOCK_M - 1) // BLOCK_M, 0).to(tl.float32)[:, None]
    joint = tl.sum(mean * n, axis=0) / (end - start)
    apart = mean - joint[None, :]
    deviations = tl.sum(m2 + n * apart * apart, axis=0)
    inside = cols < C
    at = found + part * C + cols
    tl.store(at, joint, mask=inside)
    tl.store(at + tl.num_programs(0) * C, deviations, mask=inside)


@triton.jit(do_not_specialize_on_alignment=SHORT)
def apply(
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
    """Normalised rows into ``y``; the first rows' programs also write ``moments`` (2, C) and running statistics.

    ``added`` is added before ReLU. ``offset`` is what was left out of x before it came here, and is a part of the
    running mean all the same. All of ``added``, ``running_mean``, ``running_var``, ``tracked`` and ``offset`` may be
    None.
    """
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = cols < C
    lane = tl.arange(0, BLOCK_M)
    start = tl.program_id(0) * rows
    end = tl.minimum(start + rows, M)
    ahead = _load(x, start + lane, cols, end, C)  # is on its way while parts are joined
    n = tl.maximum(tl.minimum(M - tl.arange(0, PARTS) * part_rows, part_rows), 0).to(tl.float32)[:, None]
    means = _parts(found, cols, parts, C, PARTS)
    deviations = _parts(found + parts * C, cols, parts, C, PARTS)
    relative = tl.sum(means * n, axis=0) / M
    apart = means - relative[None, :]
    m2 = tl.sum(deviations + n * apart * apart, axis=0)
    mean = relative + _line(x, cols, C)  # ends with a sum, which cannot become one operation with `x - mean`
    invstd = tl.rsqrt(m2 / M + eps)
    w = _line(weight, cols, C)
    b = _line(bias, cols, C)
    if tl.program_id(0) == 0:
        tl.store(moments + cols, mean, mask=inside)
        tl.store(moments + C + cols, invstd, mask=inside)
        if running_mean is not None:
            seen = mean
            if offset is not None:
                seen += _line(offset, cols, C)
            kept = _line(running_mean, cols, C)
            tl.store(running_mean + cols, (1 - momentum) * kept + momentum * seen, mask=inside)
        if running_var is not None:
            kept = _line(running_var, cols, C)
            tl.store(running_var + cols, (1 - momentum) * kept + momentum * (m2 / (M - 1)), mask=inside)
        if tracked is not None:
            tl.store(tracked, tl.load(tracked) + 1, mask=tl.program_id(1) == 0)
    for row in range(start, end, BLOCK_M):
        tile = ahead
        ahead = _load(x, row + BLOCK_M + lane, cols, end, C)
        out = _normalised(tile, mean, invstd, w, b)
        if added is not None:
            out += _load(added, row + lane, cols, end, C).to(tl.float32)
        if RELU:
            out = tl.where(out <= 0, 0.0, out)  # NaN stays
        at = (row + lane)[:, None] * C + cols[None, :]
        tl.store(y + at, out, mask=(row + lane < end)[:, None] & inside[None, :])


@triton.jit
def _felt(dy, x, mean, invstd, weight, bias, RELU: tl.constexpr):
    """The gradient of the norm's output in float32: zero where ReLU's was, also if that has underflowed to zero."""
    gradient = dy.to(tl.float32)
    if RELU:
        rounded = _normalised(x, mean, invstd, weight, bias).to(x.dtype)
        gradient = tl.where(rounded <= 0, 0.0, gradient)
    return gradient


@triton.jit(do_not_specialize_on_alignment=SHORT)
def gather(
    dy,
    x,
    y,
    felt,
    moments,
    weight,
    bias,
    found,
    M,
    C,
    rows,
    RELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sums of dy and of dy · x̂ for each channel over a part of ``rows`` rows, into ``found`` (2, parts, C).

    Where something was added before ReLU, x does not tell the sign of the output ``y``, which is read then, and the
    gradient of the sum is written into ``felt``. Otherwise both are None.
    """
    part = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    lane = tl.arange(0, BLOCK_M)
    start = part * rows
    end = tl.minimum(start + rows, M)
    mean = _line(moments, cols, C)
    invstd = _line(moments + C, cols, C)
    w = _line(weight, cols, C)
    b = _line(bias, cols, C)
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    along = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    ahead = _load(x, start + lane, cols, end, C)
    coming = _load(dy, start + lane, cols, end, C)  # zero beyond the end
    for row in range(start, end, BLOCK_M):
        tile = ahead
        if y is not None:
            dark = _load(y, row + lane, cols, end, C) <= 0
            gradient = tl.where(dark, 0.0, coming.to(tl.float32))
            at = (row + lane)[:, None] * C + cols[None, :]
            tl.store(felt + at, gradient, mask=(row + lane < end)[:, None] & (cols < C)[None, :])
        else:
            gradient = _felt(coming, tile, mean, invstd, w, b, RELU)
        ahead = _load(x, row + BLOCK_M + lane, cols, end, C)
        coming = _load(dy, row + BLOCK_M + lane, cols, end, C)
        total += gradient
        along += gradient * (tile.to(tl.float32) - mean[None, :])
    inside = cols < C
    at = found + part * C + cols
    tl.store(at, tl.sum(total, axis=0), mask=inside)
    tl.store(at + tl.num_programs(0) * C, tl.sum(along, axis=0) * invstd, mask=inside)


@triton.jit(do_not_specialize_on_alignment=SHORT)
def spread(
    dy,
    x,
    dx,
    found,
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
    """dL/dx = w / σ · (dy - mean(dy) - x̂ · mean(dy · x̂)); the first rows' programs also write dL/dw and dL/db."""
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = cols < C
    lane = tl.arange(0, BLOCK_M)
    start = tl.program_id(0) * rows
    end = tl.minimum(start + rows, M)
    ahead = _load(x, start + lane, cols, end, C)
    coming = _load(dy, start + lane, cols, end, C)
    total = tl.sum(_parts(found, cols, parts, C, PARTS), axis=0)
    along = tl.sum(_parts(found + parts * C, cols, parts, C, PARTS), axis=0)
    mean = _line(moments, cols, C)
    invstd = _line(moments + C, cols, C)
    w = _line(weight, cols, C)
    b = _line(bias, cols, C)
    if tl.program_id(0) == 0:
        tl.store(dbias + cols, total, mask=inside)
        tl.store(dweight + cols, along, mask=inside)
    level = (total / M)[None, :]
    slope = (along / M * invstd)[None, :]
    scale = (w * invstd)[None, :]
    for row in range(start, end, BLOCK_M):
        tile = ahead
        gradient = _felt(coming, tile, mean, invstd, w, b, RELU)
        ahead = _load(x, row + BLOCK_M + lane, cols, end, C)
        coming = _load(dy, row + BLOCK_M + lane, cols, end, C)
        out = scale * (gradient - level - (tile.to(tl.float32) - mean[None, :]) * slope)
        at = (row + lane)[:, None] * C + cols[None, :]
        tl.store(dx + at, out, mask=(row + lane < end)[:, None] & inside[None, :])
