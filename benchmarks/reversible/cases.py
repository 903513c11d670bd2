"""The cases of the benchmark, except for the overlap."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from steps import Measured, Training, build, fits, images, measure, tokens

import petra
from petra.formatting import render

Rows = Iterator[dict[str, Any]]
GIB = 2**30
LENGTH = 512


def batch(model: str, size: int, options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    if "roberta" in model:
        return tokens(size, 16 if options.smoke else LENGTH, options.device)
    return images(size, 32 if options.smoke else 224, options.device)


def small(model: str) -> dict[str, Any]:
    """Return small sizes for a smoke run."""
    if "vit" in model and "mvit" not in model:
        return {"image_size": 32, "patch": 8, "width": 32, "depth": 2, "heads": 2}
    return {}


def arguments(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the network that differ from its defaults."""
    return small(model) if options.smoke else {"seq_len": LENGTH} if "roberta" in model else {}


def attempt(model: str, way: str, size: int, options: argparse.Namespace) -> Measured | None:
    return trial(model, way, batch(model, size, options), options, arguments(model, options))


def trial(
    model: str,
    way: str,
    data: tuple[torch.Tensor, torch.Tensor],
    options: argparse.Namespace,
    extra: dict[str, Any],
) -> Measured | None:
    steps = 2 if options.smoke else options.steps
    return fits(lambda: measure(Training(build(model, way, **extra), *data, options.precision), way, steps))


def speed(options: argparse.Namespace) -> Rows:
    """Milliseconds and memory of every way; speed is relative to the first way of the same model and batch."""
    models, sizes, ways = options.models, options.batch_sizes or [64], options.ways
    if options.smoke:
        models, sizes, ways = ["rev-vit-s"], [2], ["twin", "backprop", "reversible", "pareprop"]
    table = []
    for model in models:
        for size in sizes:
            first: Measured | None = None
            for way in ways:
                found = attempt(model, way, size, options)
                yield {"model": model, "batch": size, "way": way, **(asdict(found) if found else {"peak": None})}
                if found is None:
                    table.append([model, way, str(size), "does not fit", "", "", ""])
                    continue
                first = first or found
                table.append(
                    [
                        model,
                        way,
                        str(size),
                        f"{found.seconds * 1e3:.1f}",
                        f"{found.fastest * 1e3:.1f}..{found.slowest * 1e3:.1f}",
                        f"{first.seconds / found.seconds:.2f}",
                        f"{found.peak / GIB:.2f}",
                    ]
                )
                print(" ".join(table[-1]), flush=True)
    print(render(["model", "way", "batch", "ms", "min..max", "times first", "GiB"], table, left=2), flush=True)


def depth(options: argparse.Namespace) -> Rows:
    """Peak memory without parameters, gradients and optimizer state, at growing depth."""
    plan: list[tuple[str, str, int, dict[str, Any]]] = []
    for way in ("backprop", "reversible", "pareprop"):
        for blocks in (1, 2) if options.smoke else (12, 24, 48, 96):
            width = 32 if options.smoke else 384
            plan.append(("rev-vit-s", way, blocks, {"width": width, "depth": blocks, "heads": width // 16}))
    for units in (1,) if options.smoke else (5, 50):  # two functions of two convolutions each, in three groups
        plan.append(("revnet110", "reversible", 12 * units + 2, {"depths": (units,) * 3}))
    table = []
    for model, way, count, extra in plan:
        vision = "vit" in model
        x, y = images(4 if options.smoke else 64, 32, options.device)
        extra = {**extra, "num_classes": 1000, **({"image_size": 32, "patch": 4} if vision else {})}
        found = trial(model, way, (x, y), options, extra)
        if found is None:
            table.append([model, way, str(count), "does not fit", "", ""])
            continue
        # Weights, gradients and two moments, in float32. All gradients exist at the end of the backward, where memory
        # peaks if it does not grow with depth. If it does, they come after the peak, and this is an underestimate.
        activations = found.asked - 16 * found.parameters if found.asked else 0
        layers = sum(1 for m in petra.models.create(model, **extra).modules() if isinstance(m, torch.nn.Conv2d))
        per_layer = found.seconds / (count if vision else layers)
        row = {"model": model, "way": way, "depth": count, "convolutions": layers, "activations": activations}
        yield row | asdict(found) | {"seconds_per_layer": per_layer}
        table.append(
            [
                model,
                way,
                str(count),
                f"{activations / 2**20:.1f}",
                f"{found.seconds * 1e3:.1f}",
                f"{per_layer * 1e3:.3f}",
            ]
        )
    print(render(["model", "way", "depth", "activations MiB", "ms", "ms per layer"], table, left=2), flush=True)


def budget(options: argparse.Namespace) -> Rows:
    """The largest batch that fits, a power of two or 1.5 times one, and the best throughput."""
    if options.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(options.gib * GIB / torch.cuda.get_device_properties(0).total_memory)
    models = ["rev-vit-s"] if options.smoke else options.models
    ways = ["twin", "reversible"] if options.smoke else options.ways
    ladder = options.batch_sizes or [2**i * n // 2 for i in range(3, 10) for n in (2, 3)]
    sizes = [1, 2] if options.smoke else sorted(ladder)
    table = []
    for model in models:
        for way in ways:
            largest, best = 0, 0.0
            for size in sizes:
                found = attempt(model, way, size, options)
                if found is None:
                    break
                largest, best = size, max(best, size / found.seconds)
                yield {"model": model, "way": way, "batch": size, **asdict(found)}
            table.append([model, way, str(largest), f"{best:.0f}"])
            print(" ".join(table[-1]), flush=True)
    print(render(["model", "way", "largest batch", "best per second"], table, left=2), flush=True)
