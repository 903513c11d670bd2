"""How much PaReprop can overlap: alternating steps with reversible backprop, and a timeline of both."""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any

from cases import Rows, arguments, batch
from steps import Training, build, fits
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from petra.formatting import render

WAYS = ("reversible", "pareprop")
Kernels = list[tuple[int, int, int]]
"""CUDA stream, start and end in nanoseconds since the first start."""


def overlap(options: argparse.Namespace) -> Rows:
    """Alternating steps: their medians and mean ratio, and the share of a step in which the GPU is busy."""
    models, sizes = (["rev-vit-s"], [2]) if options.smoke else (options.models, options.batch_sizes or [64])
    table = []
    for model in models:
        for size in sizes:
            for extras in [""] if options.smoke else options.extras:
                row = fits(lambda m=model, s=size, e=extras: compare(m, s, e, options))
                if row is None:
                    table.append([model, str(size), extras, "does not fit"] + [""] * 6)
                    continue
                yield row
                cells = [f"{row['seconds'][way] * 1e3:.2f}" for way in WAYS] + [f"{row['times']:.3f}"]
                cells.append("..".join(f"{end:.3f}" for end in row["interval"]))
                shares = [f"{row[what][way]:.3f}" for what in ("busy", "at_once") for way in WAYS]
                table.append([model, str(size), extras, *cells, *shares])
                print(" ".join(table[-1]), flush=True)
    header = ["model", "batch", "with", "reversible ms", "pareprop ms", "speedup", "95 %"]
    print(render([*header, "busy", "busy", "at once", "at once"], table, left=1), flush=True)


def compare(model: str, size: int, extras: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one network both ways in turn, in pairs of alternating order."""
    network = build(model, WAYS[0] + extras, **arguments(model, options))
    training = Training(network, *batch(model, size, options), options.precision)
    for _ in range(4):
        for way in WAYS:
            training.step(way)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(2 if options.smoke else 2 * options.steps):
        for way in WAYS if turn % 2 else reversed(WAYS):
            seconds[way].append(training.timed(way))
    kernels = {way: timeline(training, way) for way in WAYS}
    times, *interval = over(seconds["reversible"], seconds["pareprop"])
    return {
        "model": model,
        "batch": size,
        "extras": extras,
        "seconds": {way: statistics.median(found) for way, found in seconds.items()},
        "all_seconds": seconds,
        "times": times,
        "interval": interval,
        "busy": {way: busy(found)[0] for way, found in kernels.items()},
        "at_once": {way: busy(found)[1] for way, found in kernels.items()},
        "kernels": kernels if options.timelines else None,
    }


def over(a: list[float], b: list[float]) -> tuple[float, float, float]:
    """Return the geometric mean of a/b with its 95 % interval; effects common to both of a pair cancel."""
    ratios = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    mean, error = statistics.mean(ratios), 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return math.exp(mean), math.exp(mean - error), math.exp(mean + error)


def timeline(training: Training, way: str) -> Kernels:
    """Return the kernels of one step."""
    if training.device.type != "cuda":
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        training.timed(way)
    events = [e for e in profiler.events() or [] if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    first = min(e.time_range.start for e in events)
    spans = [(e.device_resource_id, e.time_range.start - first, e.time_range.end - first) for e in events]
    return sorted(((s, round(a * 1e3), round(b * 1e3)) for s, a, b in spans), key=lambda span: span[1])


def busy(kernels: Kernels) -> tuple[float, float]:
    """Return the shares of the time with at least one kernel running, and with at least two."""
    if not kernels:
        return 0.0, 0.0
    changes = sorted([(a, 1) for _, a, _ in kernels] + [(b, -1) for _, _, b in kernels])
    some = several = working = 0
    before = changes[0][0]
    for now, change in changes:
        some += (now - before) * (working > 0)
        several += (now - before) * (working > 1)
        working, before = working + change, now
    whole = changes[-1][0] - changes[0][0]
    return some / whole, several / whole
