"""Is there anything left to hide? PaReprop beside reversible backprop, step by step, and a timeline of both."""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any

from cases import Rows, arguments, batch
from steps import Training, build, fits
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from petra.tables import render

WAYS = ("reversible", "pareprop")
Kernels = list[tuple[int, int, int]]
"""CUDA stream, start and end in nanoseconds, from the first start on."""


def overlap(options: argparse.Namespace) -> Rows:
    """Steps taken by turns: their medians and mean ratio; and what share of a step the GPU is busy."""
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
    header = ["model", "batch", "with", "reversible ms", "pareprop ms", "times", "95 %"]
    print(render([*header, "busy", "busy", "at once", "at once"], table, left=1), flush=True)


def compare(model: str, size: int, extras: str, options: argparse.Namespace) -> dict[str, Any]:
    """One network, trained both ways by turns, in pairs of changing order."""
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
    """The geometric mean of a over b, pair by pair, with its 95 % interval: what changes from pair to pair cancels."""
    ratios = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    mean, error = statistics.mean(ratios), 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return math.exp(mean), math.exp(mean - error), math.exp(mean + error)


def timeline(training: Training, way: str) -> Kernels:
    """The kernels of one step."""
    if training.device.type != "cuda":
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        training.timed(way)
    events = [e for e in profiler.events() or [] if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    first = min(e.time_range.start for e in events)
    spans = [(e.device_resource_id, e.time_range.start - first, e.time_range.end - first) for e in events]
    return sorted(((s, round(a * 1e3), round(b * 1e3)) for s, a, b in spans), key=lambda span: span[1])


def busy(kernels: Kernels) -> tuple[float, float]:
    """The share of the time from the first to the last kernel with one at work, and with two or more."""
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
