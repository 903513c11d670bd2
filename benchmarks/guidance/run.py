"""A small convolutional network of one's own, trained with PETRA on eight stages: what makes it fail, what helps.

    python benchmarks/guidance/run.py --jobs 2
    python benchmarks/guidance/run.py --only defaults --seeds 0 --epochs 1 --out /tmp/guidance

Eight stages, one micro-batch of 32 digits per update. Every case is trained with several seeds. Prints a table and
writes result.json, after every training, so that an interrupted benchmark continues where it was.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import torch
from torch import nn

import petra
from petra.data import Batches, load_data
from petra.formatting import render
from petra.measure import environment

WARMUP = 200
CASES = {
    "defaults, reversible backprop": {"method": "reversible", "lr": None},
    "defaults, PETRA": {"lr": None},
    "lr 0.1, reversible backprop": {"method": "reversible"},
    "lr 0.1, PETRA": {},
    "… warm-up": {"warmup": WARMUP},
    "… clipping at norm 1": {"clip_norm": 1.0},
    "… `damp:4`": {"corrections": ["damp:4"]},
    "… `predict,inertia:4`": {"corrections": ["predict", "inertia:4"]},
    "… warm-up, `predict,inertia:4`": {"warmup": WARMUP, "corrections": ["predict", "inertia:4"]},
    "lr 0.02, warm-up, PETRA": {"lr": 0.02, "warmup": WARMUP},
}
"""Without other settings: PETRA, SGD with momentum 0.9, constant learning rate."""


class Stem(nn.Module):
    """The layer before the reversible blocks: two streams from an image."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()
        )

    def forward(self, x):
        return self.layers(x).chunk(2, 1)


class Head(nn.Module):
    """The layer after the reversible blocks: classes from two streams."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(2 * width, 10)

    def forward(self, x1, x2):
        return self.linear(torch.cat([x1, x2], 1).mean((2, 3)))


def function(width):
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


def make_network(width=8, blocks=6):
    """Return the network, of blocks + 2 layers."""
    middle = [petra.ReversibleBlock(function(width), function(width)) for _ in range(blocks)]
    return petra.Network(Stem(width), *middle, Head(width))


def make_trainer(network, method="petra", lr=0.1, warmup=0, clip_norm=None, corrections=None):
    """Return the trainer of a case; without a learning rate, everything is left to the trainer."""
    stages = len(network) if method == "petra" else 1
    common = {"method": method, "stages": stages, "loss": nn.functional.cross_entropy, "clip_norm": clip_norm}
    if lr is None:
        return petra.Trainer(network, **common)
    return petra.Trainer(
        network,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda update: min(1.0, (update + 1) / max(1, warmup))
        ),
        corrections=corrections,
        **common,
    )


def train(case, seed, epochs):
    """Train one network, and return accuracies and losses by epoch."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = load_data("digits")
    batches, test = Batches(data, "train", batch_size=32, seed=seed), Batches(data, "test", batch_size=360)
    trainer = make_trainer(make_network(), **CASES[case])
    found = {"case": case, "seed": seed, "accuracy": [], "train_loss": []}
    for epoch in range(epochs):
        losses = [float(r.loss) for x, y in batches.epoch(epoch) for r in trainer.step(x, y)]
        if epoch == epochs - 1:
            losses += [float(r.loss) for r in trainer.drain()]
        found["train_loss"].append(fmean(losses))
        found["accuracy"].append(trainer.evaluate(test.epoch(0)).accuracy)
    return found


def table(trainings):
    """Return a line for every case: means over seeds, and the accuracy of every seed."""
    rows = []
    for case in CASES:
        own = sorted((t for t in trainings if t["case"] == case), key=lambda t: t["seed"])
        if own:
            last = [t["accuracy"][-1] for t in own]
            loss = fmean(t["train_loss"][-1] for t in own)
            rows.append([case, f"{fmean(last):.1%}", ", ".join(f"{a:.1%}" for a in last), f"{loss:.2f}"])
    return render(["training", "accuracy", "seeds", "training loss"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, metavar="N", help="(default %(default)s)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED", help="(default 0 1 2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the cases whose name contains the text")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings at the same time")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "result.json"
    trainings = json.loads(file.read_text())["trainings"] if file.exists() else []
    done = {(t["case"], t["seed"]) for t in trainings if len(t["accuracy"]) == options.epochs}
    todo = [(c, s) for c in CASES for s in options.seeds if options.only in c and (c, s) not in done]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(train, case, seed, options.epochs) for case, seed in todo]):
            trainings.append(future.result())
            result = {"epochs": options.epochs, "trainings": trainings, "environment": environment(torch.device("cpu"))}
            file.write_text(json.dumps(result, indent=2) + "\n")
    print(table(trainings))


if __name__ == "__main__":
    main()
