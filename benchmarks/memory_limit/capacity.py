"""The largest batch, the deepest network and the longest text that can be trained in a given memory.

    python benchmarks/memory_limit/capacity.py --model vit-l --quantity batch
    python benchmarks/memory_limit/capacity.py --model gpt-350m --quantity tokens
    python benchmarks/memory_limit/capacity.py --smoke

Every figure is the size of real training steps whose peak is under the limit, found to 3 %. The peak is
that of PyTorch's allocator, with weights, gradients and optimizer state. The ways are those of `run.py`: the plain
network stored, with compiler budgets, fully checkpointed and offloaded, and the reversible network. Prints a table and
writes a JSON file after every way.
"""

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from run import MODELS, SMALL, Training, blocks

from petra.formatting import memory_size, render
from petra.measure import environment
from petra.memory.step_cost import cpu_peak

WAYS = {
    "backprop": "store",
    "compiler budget 0.5": "store:0.5",
    "compiler budget 0.2": "store:0.2",
    "full checkpointing": "recompute",
    "offloading": "offload",
    "reversible": "reconstruct",
}
GIB = 2**30
CLOSE = 0.03


def peak_of(model: str, storage: str, sizes: dict[str, Any], device: torch.device) -> int | None:
    """Return the peak memory of the second training step; None if the device has too little."""
    try:
        training = Training(f"rev-{model}" if storage == "reconstruct" else model, sizes, device)
        if storage.startswith("store:"):
            training.network.compile_functions()
        if storage != "reconstruct":
            storages = ["store"] * len(training.network)
            for index in blocks(training.network):
                storages[index] = storage
            training.network.use_storage(*storages)
        training.step()
        if device.type == "cpu":
            return training.allocated() + cpu_peak(training.step)
        torch.cuda.reset_peak_memory_stats(device)
        training.step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    except torch.OutOfMemoryError:
        return None
    finally:
        training = None
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def largest(peak: Callable[[int], int | None], limits: Sequence[int], unit: int) -> list[int]:
    """Return the largest size whose peak is under each limit; 0 if one unit is too large.

    Peaks grow nearly linearly with the size, so the size to measure next is interpolated between the two measured peaks
    around the limit. A size is accepted if one that is larger by the share `CLOSE`, or by one unit, does not fit.

    Args:
        peak: Measures the peak of a size; None if the device has too little memory.
        limits: The limits, in bytes.
        unit: The smallest size; all sizes are multiples of it.
    """
    peaks: dict[int, int | None] = {}
    found = []
    for limit in sorted(limits):
        fits = {count: own is not None and own <= limit for count, own in peaks.items()}
        low = max((count for count, own in fits.items() if own), default=0)
        high = min((count for count in fits if count > low), default=0)  # does not fit; 0 if none is known
        while not high or high - low > max(1, CLOSE * low):
            count = _next(peaks, limit, low, high)
            own = peaks[count] = peak(count * unit)
            low, high = (count, high) if own is not None and own <= limit else (low, count)
        found.append(low * unit)
    return found


def _next(peaks: dict[int, int | None], limit: int, low: int, high: int) -> int:
    """Return the size to measure next, larger than `low` and smaller than `high` (if that is not 0)."""
    step = max(1, int(CLOSE * low))
    known = sorted((count, own) for count, own in peaks.items() if own is not None)
    if len(known) < 2:
        guess = 2 * low or 1
    else:
        # The two sizes next to the limit, or the two largest below it.
        above = next((i for i, (_, own) in enumerate(known) if own > limit), len(known) - 1)
        (a, first), (b, second) = known[max(0, above - 1)], known[max(1, above)]
        guess = a + int((b - a) * (limit - first) / (second - first)) if second > first else 2 * low or 1
        guess = min(guess, 8 * max(low, 1))  # a line through small sizes is not exact
    if guess <= low:  # does the next larger one fit?
        guess = low + step
    if high and guess >= high:
        guess = high - step if high - low <= 4 * step else (low + high) // 2
    return max(guess, low + 1)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="vit-l")
    parser.add_argument("--quantity", choices=("batch", "depth", "tokens"), default="batch")
    parser.add_argument("--unit", type=int, help="sizes are multiples of it (default: 4 samples, 4 blocks, 512 tokens)")
    parser.add_argument("--batch-size", type=int, default=8, help="where the quantity is another one")
    parser.add_argument("--limits", type=float, nargs="+", default=[8, 16, 24, 80, 135], help="GiB")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--smoke", action="store_true", help="tiny; nothing is stored")
    options = parser.parse_args()
    if options.quantity == "tokens" and "tokens" not in MODELS[options.model] and not options.smoke:
        parser.error(f"--quantity tokens is for language models, and {options.model} is none: choose batch or depth")
    unit = options.unit or {"batch": 4, "depth": 4, "tokens": 512}[options.quantity]
    device, sizes = torch.device(options.device), dict(MODELS[options.model])
    if options.smoke:
        sizes, unit, options.limits = SMALL[options.model], 1, [0.0015]
        options.ways = ["backprop", "reversible"]
    sizes["batch"] = options.batch_size
    rows: dict[str, list[int]] = {}
    for way in options.ways:

        def peak(size: int, way: str = way) -> int | None:
            found = peak_of(options.model, WAYS[way], {**sizes, options.quantity: size}, device)
            print(f"{way}, {options.quantity} {size}: {memory_size(found) if found else 'out of memory'}", flush=True)
            return found

        rows[way] = largest(peak, [int(limit * GIB) for limit in options.limits], unit)
        if not options.smoke:
            settings = {key: value for key, value in vars(options).items() if key != "out"}
            options.out.mkdir(parents=True, exist_ok=True)
            file = options.out / f"capacity-{options.model}-{options.quantity}.json"
            record = {**settings, "sizes": sizes, "environment": environment(device), "rows": rows}
            file.write_text(json.dumps(record, indent=2) + "\n")
    header = [options.quantity, *(f"{limit:g} GiB" for limit in sorted(options.limits))]
    print(render(header, [[way, *map(str, found)] for way, found in rows.items()], left=1))


if __name__ == "__main__":
    main()
