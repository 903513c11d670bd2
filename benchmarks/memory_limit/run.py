"""The fastest training step for a given amount of memory: plans of petra.fit_memory against the usual ways.

    python benchmarks/memory_limit/run.py --model vit-l --limits 16 12 10 9 8 7 6 5
    python benchmarks/memory_limit/run.py --smoke

The rivals train the plain network: `torch.compile` with activation memory budgets (block by block, and with --whole the
network as one graph), full and selective checkpointing of every block, and offloading to pinned host memory. The
reversible network with every block reconstructed is one more rival. All steps have the same data, bf16 autocast on a
GPU, and fused AdamW. Steps that can be captured as a CUDA graph are timed as one, so that the time of the host does not
count. Peaks are those of PyTorch's allocator, with weights, gradients and optimizer state. Prints tables and writes a
JSON file after every measurement.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import petra
from petra.formatting import memory_size, parse_bytes, render
from petra.measure import environment
from petra.memory import COMPILED_STORAGES, EAGER_STORAGES, DoesNotFit, PlanSearch, allocated_bytes
from petra.memory.memory_plan import MeasuredPlan
from petra.memory.step_cost import StepCost, measure_step

MODELS: dict[str, dict[str, Any]] = {
    "vit-l": {"image": 224, "batch": 64},
    "swin-b": {"image": 224, "batch": 64},
    "gpt-350m": {"tokens": 2048, "batch": 8, "vocab_size": 32768},
}
SMALL: dict[str, dict[str, Any]] = {
    "vit-l": {"image": 32, "batch": 4, "patch": 8, "width": 32, "depth": 3, "heads": 2},
    "swin-b": {"image": 32, "batch": 4, "patch": 2, "width": 16, "depths": (2, 2), "heads": (2, 4), "window": 4},
    "gpt-350m": {"tokens": 32, "batch": 4, "vocab_size": 64, "width": 32, "depth": 3, "heads": 2},
}


class Training:
    """One network, one batch, one optimizer."""

    def __init__(self, model: str, sizes: dict[str, Any], device: torch.device, capture: bool = True) -> None:
        torch.manual_seed(0)
        self.device, self.capture = device, capture
        sizes = dict(sizes)
        batch = sizes.pop("batch")
        with torch.device(device):
            if "tokens" in sizes:
                length, vocabulary = sizes.pop("tokens"), sizes["vocab_size"]
                text = torch.randint(vocabulary, (batch, length + 1))
                self.x, self.y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
                sizes["seq_len"] = length
            else:
                side = sizes.pop("image")
                sizes["image_size"] = side
                self.x, self.y = torch.randn(batch, 3, side, side), torch.randint(1000, (batch,))
                sizes["num_classes"] = 1000
            self.network = petra.models.create(model, **sizes)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), 1e-4, fused=True, capturable=self.device.type == "cuda"
        )
        self.module: nn.Module = self.network

    def step(self, parts: int = 1) -> None:
        half = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        for x, y in zip(self.x.chunk(parts), self.y.chunk(parts), strict=True):
            with half:
                loss = nn.functional.cross_entropy(self.module(x).flatten(0, -2), y.flatten())
            (loss / parts).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def allocated(self) -> int:
        return allocated_bytes(self.network, [self.optimizer])

    def cost(self, parts: int = 1) -> StepCost | None:
        found = measure_step(lambda: self.step(parts), self.device, self.allocated, self.capture)
        self.optimizer.zero_grad()
        return found


def blocks(network: petra.Network) -> list[int]:
    """Return the layers of which there are several of a kind."""
    kinds = [type(layer) for layer in network]
    return [i for i, kind in enumerate(kinds) if kinds.count(kind) > 1]


def rivals(options: argparse.Namespace, sizes: dict[str, Any], device: torch.device, say: Callable[..., None]) -> None:
    """Measure the usual ways to train the plain network, and the reversible network."""
    on_gpu = device.type == "cuda"
    ways = [("recompute", "full checkpointing"), ("selective", "selective checkpointing"), ("offload", "offloading")]
    ways = [("store", "stored"), *ways] if options.eager else [("store", "stored")]
    if options.compile:
        ways += [(f"store:{budget:g}", f"compiler budget {budget:g}") for budget in options.budgets]
        ways += [("recompute", "full checkpointing, compiled")]
    training = Training(options.model, sizes, device, options.capture)
    for storage, name in ways:
        if options.compile and (storage.startswith("store:") or "compiled" in name):
            training.network.compile_functions()
        storages = ["store"] * len(training.network)
        for index in blocks(training.network):
            storages[index] = storage
        training.network.use_storage(*storages)
        training.capture = options.capture and storage != "offload"  # a capture cannot allocate pinned memory
        began = time.perf_counter()
        say("rival", name, training.cost(), time.perf_counter() - began)
    for budget in options.whole:
        del training
        gc.collect()
        training = Training(options.model, sizes, device, options.capture)
        torch._dynamo.reset()
        from torch._functorch import config

        with config.patch(activation_memory_budget=budget):
            training.module = torch.compile(training.network, dynamic=False)
            began = time.perf_counter()
            say("rival", f"compiler budget {budget:g}, whole network", training.cost(), time.perf_counter() - began)
    del training
    gc.collect()
    training = Training(f"rev-{options.model}", sizes, device, options.capture)
    if options.compile:
        training.network.compile_functions()
    began = time.perf_counter()
    say("rival", "reversible network", training.cost(), time.perf_counter() - began)
    del training
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def ours(
    model: str,
    options: argparse.Namespace,
    sizes: dict[str, Any],
    device: torch.device,
    say: Callable[..., None],
) -> None:
    """Fit a network into each limit, and measure the steps that result. One search shares measurements of plans."""
    training = Training(model, sizes, device, options.capture)
    if options.compile:
        training.network.compile_functions()
    search = PlanSearch(
        training.network,
        0,
        training.step if options.parts else lambda parts: training.step(),
        device,
        allocated=training.allocated,
        storages=COMPILED_STORAGES if options.compile else EAGER_STORAGES,
        max_parts=16 if options.parts else 1,
        capture=options.capture,
        quiet=True,
    )
    plan = None
    for limit in options.limits:
        began = time.perf_counter()
        search.limit = parse_bytes(f"{limit} GiB")
        try:
            plan = search.run(cache=False)
        except DoesNotFit as error:
            say(model, str(error), None, time.perf_counter() - began, limit=limit)
            continue
        seconds = time.perf_counter() - began
        cost = training.cost(plan.parts)
        name = MeasuredPlan(plan.storages, plan.parts, None).describe()
        say(model, name, cost, seconds, limit=limit, parts=plan.parts)
    print(plan or f"{model}: nothing fits", flush=True)


def show(rows: list[dict[str, Any]]) -> str:
    """Return the table of all measurements."""
    rivals = [row for row in rows if row["kind"] == "rival" and row["peak"]]
    cells = []
    for row in rows:
        limit = parse_bytes(f"{row['limit']} GiB") if row["limit"] else None
        best = min((r["ms"] for r in rivals if limit and r["peak"] <= limit), default=None)
        cells.append(
            [
                row["kind"],
                row["name"],
                memory_size(limit) if limit else "",
                f"{row['ms']:.1f}" if row["ms"] else "",
                memory_size(row["peak"]) if row["peak"] else "out of memory",
                f"{best:.1f}" if best else "",
                f"{row['ms'] / best:.2f}" if best and row["ms"] else "",
                f"{row['seconds']:.0f}",
            ]
        )
    return render(["network", "", "limit", "ms", "peak", "best rival", "ratio", "s"], cells)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="vit-l")
    parser.add_argument("--limits", type=float, nargs="*", default=[16, 14, 12, 10, 9, 8, 7, 6], help="GiB")
    parser.add_argument(
        "--budgets", type=float, nargs="*", default=[1, 0.7, 0.5, 0.3, 0.2, 0.1], help="of the compiler"
    )
    parser.add_argument("--whole", type=float, nargs="*", default=[], help="budgets for the network as one graph")
    parser.add_argument("--eager", action="store_true", help="also rivals that are not compiled")
    parser.add_argument("--no-parts", dest="parts", action="store_false", help="do not split the batch")
    parser.add_argument(
        "--no-capture", dest="capture", action="store_false", help="time steps as they are, not as CUDA graphs"
    )
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--plain", action="store_true", help="find no plans for the reversible network")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--smoke", action="store_true", help="tiny, not compiled; nothing is stored")
    options = parser.parse_args()
    device, sizes = torch.device(options.device), dict(MODELS[options.model])
    if options.batch_size:
        sizes["batch"] = options.batch_size
    if options.smoke:
        sizes = dict(SMALL[options.model])
        options.compile, options.eager, options.limits = False, True, [0.01, 0.0012]
    rows: list[dict[str, Any]] = []

    def say(kind: str, name: str, cost: StepCost | None, seconds: float, **more: Any) -> None:
        ms, peak = (1e3 * cost.seconds, cost.peak) if cost else (None, None)
        rows.append({"kind": kind, "name": name, "ms": ms, "peak": peak, "seconds": seconds, "limit": None, **more})
        print(f"{name}: {ms and round(ms, 1)} ms, {peak and memory_size(peak)}, {seconds:.0f} s", flush=True)
        if not options.smoke:
            settings = {key: value for key, value in vars(options).items() if key != "out"}
            record = {**settings, "sizes": sizes, "environment": environment(device), "rows": rows}
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{options.model}.json").write_text(json.dumps(record, indent=2) + "\n")

    rivals(options, sizes, device, say)
    for model in (options.model, *([] if options.plain else [f"rev-{options.model}"])):
        ours(model, options, sizes, device, say)
        gc.collect()
    print(show(rows))


if __name__ == "__main__":
    main()
