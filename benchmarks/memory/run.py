"""Memory of the delayed-gradient family: Tables 3 and 6 of the PETRA paper, by exact accounting.

    python benchmarks/memory/run.py

The engine runs on PyTorch's "meta" device, where tensors have shapes but no memory, and its tensors are counted. The
same count is compared byte for byte with a real run at a smaller size. Prints tables and writes result.json next to
this file.
"""

import argparse
import json
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import petra
from petra.formatting import render
from petra.measure import MemoryProbe, StageMemory, environment, nbytes

TABLE_3 = {  # method: (inputs kept, weights kept, GB, saving in %)
    "delayed": ("yes", "yes", 44.5, 0.0),
    "checkpointed": ("yes", "no", 43.6, 2.0),
    "petra-stashed": ("no", "yes", 21.2, 52.3),
    "petra": ("no", "no", 20.3, 54.3),
}
TABLE_6 = {  # GB of each stage, CIFAR-10, batch 256
    (2, 2, 2, 2): [1.15, 1.01, 1.01, 2.67, 0.52, 1.13, 0.31, 0.57, 0.25, 0.11],
    # labelled RevNet-34 in the paper, but its four groups have equal length, unlike RevNet-34's 3, 4, 6 and 3 blocks
    (4, 4, 4, 4): [1.15, *[1.01] * 4, 4.2, *[0.52] * 3, 1.66, *[0.31] * 3, 0.71, *[0.25] * 3, 0.11],
}


class Buffers:
    """Peak bytes of saved inputs and of stashed weights on each stage."""

    def __init__(self, stages: int) -> None:
        self.inputs, self.weights = [0] * stages, [0] * stages

    def __call__(self, tick, action, stage) -> None:
        held, s = stage.tensors_by_category(), stage.index
        self.inputs[s] = max(self.inputs[s], nbytes(held["inputs"]))
        self.weights[s] = max(self.weights[s], nbytes(held["stashed weights"]))


def steady(model, method, batch, size, device, schedule="lock-step", **options):
    """Return a trainer with a full pipeline and one stage per layer, and the peaks of its buffers so far."""
    with torch.device(device):
        network = petra.models.create(model, **options)
    trainer = petra.Trainer(
        network,
        loss=cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
        method=method,
        stages=len(network),
        schedule=schedule,
    )
    buffers = Buffers(len(network))
    trainer.executor.observers.append(buffers)
    # Until the pipeline is full and every micro-batch in flight has seen different weights.
    for _ in range((2 if trainer.method.stashes_weights else 1) * trainer.schedule.staleness(0) + 3):
        trainer.step(
            torch.zeros(batch, 3, size, size, device=device), torch.zeros(batch, dtype=torch.long, device=device)
        )
    return trainer, buffers


def stage_memory(model, method, batch, size, device, **options) -> list[StageMemory]:
    """Return the memory of all stages by category in a tick of a full pipeline."""
    trainer, _ = steady(model, method, batch, size, device, **options)
    with MemoryProbe(trainer.executor) as probe:
        trainer.step(
            torch.zeros(batch, 3, size, size, device=device), torch.zeros(batch, dtype=torch.long, device=device)
        )
    return probe.stages


def table_3() -> list[dict]:
    rows = []
    for method, (inputs, weights, paper, saving) in TABLE_3.items():
        trainer, buffers = steady("revnet50", method, 64, 224, "meta", num_classes=1000, stem="imagenet")
        model = sum(p.numel() * p.element_size() for p in trainer.network.parameters())
        kept = sum(buffers.inputs[1:])  # the first stage can read its inputs again, as in the paper
        total = (model + kept + sum(buffers.weights)) / 1e9
        rows.append({"method": method, "inputs": inputs, "weights": weights, "gigabytes": total, "paper": paper})
        rows[-1] |= {"saving": 100 * (1 - total / rows[0]["gigabytes"]), "paper_saving": saving}
    return rows


def counted_and_measured() -> list[dict]:
    """Compare counted with measured bytes of the same small run."""
    rows = []
    for method in TABLE_3:
        sizes = {"model": "revnet50", "method": method, "batch": 2, "size": 32, "width": 8, "stem": "imagenet"}
        counted, measured = (stage_memory(device=device, **sizes) for device in ("meta", "cpu"))
        difference = max(abs(a.total - b.total) for a, b in zip(counted, measured, strict=True))
        total = sum(row.total for row in measured)
        rows.append({"method": method, "measured_bytes": total, "largest_difference_of_a_stage": difference})
    return rows


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    result: dict = {"environment": environment()}
    result["table_3"] = table_3()
    print("Table 3: RevNet-50, ImageNet shapes, batch 64: model + input buffers + weight buffers, lock-step\n")
    header = ["method", "inputs kept", "weights kept", "GB", "saving", "paper GB", "paper saving"]
    print(
        render(
            header,
            [
                [
                    r["method"],
                    r["inputs"],
                    r["weights"],
                    f"{r['gigabytes']:.1f}",
                    f"{r['saving']:.1f} %",
                    r["paper"],
                    f"{r['paper_saving']} %",
                ]
                for r in result["table_3"]
            ],
        )
    )
    result["counted_and_measured"] = counted_and_measured()
    print("\nThe same accounting compared with a real run (RevNet-50, width 8, 32×32, batch 2), all categories\n")
    print(
        render(
            ["method", "bytes measured", "largest difference of a stage, bytes"],
            [list(r.values()) for r in result["counted_and_measured"]],
        )
    )
    result["table_6"] = {}
    for depths, paper in TABLE_6.items():
        model = f"revnet18 with {'-'.join(map(str, depths))} blocks"
        ours = {
            schedule: [
                row.total / 1e9
                for row in stage_memory("revnet18", "petra", 256, 32, "meta", schedule=schedule, depths=depths)
            ]
            for schedule in ("lock-step", "low-staleness")
        }
        result["table_6"][model] = {"paper": paper, **ours}
        print(f"\nTable 6: {model}, CIFAR-10, batch 256, PETRA: GB of each stage, everything included\n")
        rows = [["paper", *paper], *([name, *(f"{v:.2f}" for v in values)] for name, values in ours.items())]
        print(render(["stage", *map(str, range(len(paper)))], rows))
        correlation = torch.corrcoef(torch.tensor([paper, ours["lock-step"]]))[0, 1]
        result["table_6"][model]["correlation"] = float(correlation)
        print(f"correlation of lock-step with the paper: {correlation:.3f}")
    Path(__file__).with_name("result.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
