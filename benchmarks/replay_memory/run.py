"""Activation memory against the number of modules K: Figure 5 and Table 1 of the Features Replay paper.

    python benchmarks/replay_memory/run.py

ResNet-101 on CIFAR shapes, batch 128, K = 1 … 4, by exact accounting: the engine runs on PyTorch's "meta" device, where
tensors have shapes but no memory, and `petra.measure.Activations` counts live bytes. The same count is compared with a
real run at a smaller size. The reversible variant is `petra` with the schedule `locked-forward` on RevNet-104, next to
backprop on the same network. Prints tables and writes result.json, and memory.png if matplotlib is installed, next to
this file.
"""

import argparse
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import petra
from petra.formatting import render
from petra.measure import Activations, environment
from petra.pipeline import balance

MODULES = (1, 2, 3, 4)
RESNET, REVNET = "resnet101-cifar", "revnet104"
LINES = (
    (RESNET, "backprop", None),
    (RESNET, "features-replay", None),
    (RESNET, "ddg", None),
    (RESNET, "dni", None),
    (REVNET, "backprop", None),
    (REVNET, "features-replay", None),
    (REVNET, "petra", "locked-forward"),
)
OPTIONS = {RESNET: {}, REVNET: {"stem": "cifar", "num_classes": 10}}


def watch(model, method, stages, batch, device="meta", schedule=None, **options) -> Activations:
    """Return the activations of one iteration of a full pipeline."""
    with torch.device(device):
        network = petra.models.create(model, **OPTIONS[model], **options)
    trainer = petra.Trainer(
        network,
        loss=cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
        method=method,
        stages=len(network) if stages == "layers" else stages,
        schedule=schedule,
    )

    def step() -> None:
        inputs = torch.zeros(batch, 3, 32, 32, device=device)
        trainer.step(inputs, torch.zeros(batch, dtype=torch.long, device=device))

    for _ in range(trainer.schedule.stages if method != "backprop" else 1):
        step()
    with Activations(trainer.executor) as found:
        step()
    return found


@cache
def even_cut(model: str, modules: int) -> tuple[int, ...]:
    """Return the layers of each module such that backprop has similar activation memory in each."""
    sizes = _bytes_of_layers(model)
    cut = balance(len(sizes), modules, lambda part, layers: sum(sizes[i] for i in layers))
    return tuple(len(layers) for layers in cut)


@cache
def _bytes_of_layers(model: str) -> list[int]:
    found = watch(model, "backprop", "layers", 1).stages
    return [found[i] for i in sorted(found)]


def lines(cut: str, batch: int) -> list[dict]:
    """Return one row per method and network: the bytes of every module for each K."""
    rows = []
    for model, method, schedule in LINES:
        if cut == "even" and model != RESNET:
            continue
        row: dict = {"model": model, "method": method, "schedule": schedule, "cut": cut, "modules": {}}
        for k in MODULES:
            sizes = even_cut(model, k) if cut == "even" else k
            found = watch(model, method, sizes, batch, schedule=schedule)
            own = [found.stages[s] for s in range(k)]
            row["modules"][k] = {"layers": sizes, "bytes": own, "sum": sum(own), "together": found.peak}
        rows.append(row)
        basic = next(r for r in rows if r["model"] == model)
        for k, entry in row["modules"].items():
            entry["times_backprop"] = entry["sum"] / basic["modules"][k]["sum"]
            entry["times_backprop_undivided"] = entry["sum"] / basic["modules"][1]["sum"]
    return rows


def counted_and_measured(batch: int = 2, width: int = 8) -> list[dict]:
    """Compare counted with measured bytes of the same small networks."""
    rows = []
    for model, method, schedule in LINES:
        small = {"schedule": schedule, "width": width}
        counted, real = (watch(model, method, 4, batch, device, **small) for device in ("meta", "cpu"))
        difference = max(abs(counted.stages[s] - real.stages[s]) for s in range(4))
        rows.append({"model": model, "method": method, "measured_bytes": real.stages.total(), "difference": difference})
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Draw Figure 5, one panel per cut."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cuts = list(dict.fromkeys(row["cut"] for row in rows))
    figure = Figure(figsize=(5 * len(cuts), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, cut in zip(figure.subplots(1, len(cuts), squeeze=False).flat, cuts, strict=True):
        for row in (r for r in rows if r["cut"] == cut):
            values = [row["modules"][k]["sum"] / 2**30 for k in MODULES]
            line = "o-" if row["model"] == RESNET else "s--"
            axis.plot(MODULES, values, line, label=f"{row['method']}, {row['model'].removesuffix('-cifar')}")
        axis.legend(fontsize="small")
        axis.set(xlabel="modules K", ylabel="activations of all modules, GiB", title=f"cut: {cut}", ylim=(0, None))
        axis.set_xticks(MODULES)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    result: dict = {"environment": environment(), "batch_size": options.batch_size, "runs": []}
    for cut, what in (("layers", "equal numbers of layers"), ("even", "equal activations in backprop")):
        rows = lines(cut, options.batch_size)
        result["runs"] += rows
        print(f"\nCIFAR shapes, batch {options.batch_size}, modules of {what}: GiB of activations of all modules\n")
        header = ["network", "method", *(f"K = {k}" for k in MODULES), *(f"times BP, {k}" for k in MODULES)]
        cells = [[r["modules"][k] for k in MODULES] for r in rows]
        table = [
            [
                r["model"],
                r["method"],
                *(f"{c['sum'] / 2**30:.2f}" for c in found),
                *(f"{c['times_backprop']:.2f}" for c in found),
            ]
            for r, found in zip(rows, cells, strict=True)
        ]
        print(render(header, table, left=2), flush=True)
    result["counted_and_measured"] = counted_and_measured()
    print("\nThe same accounting compared with a real run (width 8, batch 2, K = 4)\n")
    header = ["network", "method", "bytes measured", "largest difference of a module, bytes"]
    print(render(header, [list(row.values()) for row in result["counted_and_measured"]], left=2))
    Path(__file__).with_name("result.json").write_text(json.dumps(result, indent=2) + "\n")
    if find_spec("matplotlib") is None:
        print("\nno figure: pip install matplotlib")
    else:
        draw(result["runs"], Path(__file__).with_name("memory.png"))


if __name__ == "__main__":
    main()
