"""The cost of conversion in accuracy: a small transformer on the 8×8 digits, converted and fine-tuned.

    python benchmarks/conversion/run.py

Trains networks of 6 blocks, pre-norm and post-norm, converts them with petra.make_reversible and every coupling, and
fine-tunes the converted networks and, for comparison, the original. Measures accuracy before and after, and the peak
activations of a training step. Prints a table and writes result.json next to this file.
"""

import argparse
import copy
import json
import statistics
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import petra
from petra.formatting import render
from petra.measure import MemoryProbe, environment

COUPLINGS = ("additive", "bdia", "midpoint")


class Classifier(nn.Module):
    """Sixteen patches of 2×2 pixels as tokens, averaged at the end."""

    def __init__(self, depth: int, norm_first: bool, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.position = nn.Parameter(0.1 * torch.randn(16, width))
        self.norm = nn.LayerNorm(width)  # after pre-norm blocks, before post-norm blocks
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, gelu, batch_first=True, norm_first=norm_first)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm_first = norm_first
        for parameter in self.blocks.parameters():  # the encoder copies one layer, with its weights
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.finish(self.blocks(self.start(x)))

    def start(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.position
        return x if self.norm_first else self.norm(x)

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.norm(x) if self.norm_first else x).mean(1))

    def stages(self):
        norms = ([], [self.norm]) if self.norm_first else ([self.norm], [])
        start = (self.start, self.embed, self.position, *norms[0])
        return [start, *self.blocks.layers, (self.finish, self.head, *norms[1])]


def digits():
    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).view(-1, 8, 8) / 8 - 1
    patches = x.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 16, 4)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return patches[order], torch.tensor(y)[order]


def train(network, x, y, epochs, lr, seed):
    optimizer = torch.optim.AdamW(network.parameters(), lr, weight_decay=0.05)
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * -(-len(x) // 50)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(50):
            optimizer.zero_grad()
            cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()
            scheduler.step()


@torch.no_grad()
def accuracy(network, x, y):
    right = network.eval()(x).argmax(1) == y
    network.train()
    return 100 * right.float().mean().item()


def measure(depth, norm_first, seed, data, options):
    """Return, for the original and each coupling, accuracy at first, accuracy after tuning, and peak activations."""
    x, y, test = *(part[:1400] for part in data), tuple(part[1400:] for part in data)
    torch.manual_seed(seed)
    network = Classifier(depth, norm_first)
    train(network, x, y, options.epochs, 1e-3, seed)
    networks = {"original": network}
    for coupling in COUPLINGS:
        networks[coupling] = petra.make_reversible(copy.deepcopy(network), coupling=coupling)
    found = {}
    for name, tuned in networks.items():
        method = "backprop" if name == "original" else "reversible"
        before, peak = accuracy(tuned, *test), activation_peak(tuned, method, x[:50], y[:50])
        train(tuned, x, y, options.tuning, 5e-4, seed + 100)
        found[name] = [before, accuracy(tuned, *test), peak]
    return found


def activation_peak(network, method, x, y):
    """Return the peak activations of a training step in MiB."""
    trainer = petra.Trainer(network, method=method, loss=cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    with MemoryProbe(trainer.executor) as probe:
        trainer.step(x, y)
    return probe.activation_peak / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[6])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--tuning", type=int, default=5, help="epochs of fine-tuning")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data, rows, results = digits(), [], []
    for norm_first in (True, False):
        for depth in options.depths:
            found = [measure(depth, norm_first, seed, data, options) for seed in range(options.seeds)]
            name = f"{depth} blocks, {'pre' if norm_first else 'post'}-norm"
            for coupling in found[0]:
                seeds = [one[coupling] for one in found]
                before, after, peak = (statistics.mean(column) for column in zip(*seeds, strict=True))
                rows.append([name, coupling, f"{before:.1f} %", f"{after:.1f} %", f"{peak:.1f} MiB"])
                results.append({"network": name, "coupling": coupling, "before_after_peak": seeds})
                print(rows[-1], flush=True)
    print(render(["network", "coupling", "before tuning", "fine-tuned", "peak activations"], rows))
    path = Path(__file__).with_name("result.json")
    path.write_text(json.dumps({**vars(options), "results": results, "environment": environment()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
