"""What it costs that a pipeline cannot tie the weights of embedding and head: a plain training loop with and without.

    python experiments/language/weight_tying.py --data books-8k                  # on a GPU
    python experiments/language/weight_tying.py --data books-1k --divide 8 --device cpu --sequences 32 --seq-len 64
    python experiments/language/weight_tying.py --data tokens --smoke            # tiny, on the CPU; stores nothing

Embedding and head are in different stages, each with its own optimizer and perhaps in another process, so they cannot
share weights. In one process without a pipeline they can. This script trains the plain GPT of 25M parameters
(`gpt-25m`) with AdamW both ways, and once more tied with a width that gives it as many parameters as the untied
network. Prints a table, and writes it with the environment to weight_tying.json next to this file.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch

from petra import models
from petra.data import Batches, load_data
from petra.formatting import render
from petra.measure import environment
from petra.trainer import cross_entropy, optimizers

WIDTHS = {"untied": 448, "tied": 448, "tied, as many parameters": 512}
HEAD = 64
"""Channels of an attention head."""


def train(name: str, given: argparse.Namespace, lr: float) -> tuple[int, float]:
    """Train one network; return its number of parameters and its test loss."""
    torch.manual_seed(given.seed)
    data = load_data(f"tokens:{given.data}", seq_len=given.seq_len)
    width = WIDTHS[name] // given.divide
    sizes = {"heads": max(1, width // HEAD), **({"depth": 1} if given.smoke else {})}
    network = models.create("gpt-25m", **data.arguments, width=width, **sizes).to(given.device)
    if name != "untied":
        network.head.fc.weight = network.stem.tokens.weight  # type: ignore[union-attr]
    parameters = list(network.parameters())  # a shared one once
    optimizer = optimizers.adamw(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    batches = Batches(data, "train", given.sequences, seed=given.seed, drop_last=True, device=given.device)
    steps, warmup = len(batches), max(1, len(batches) // 10)
    curve = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, 0.5 * (1 + math.cos(math.pi * max(0, i - warmup) / steps)))
    )
    bf16 = torch.autocast(torch.device(given.device).type, torch.bfloat16, enabled=given.device != "cpu")
    for x, y in batches.epoch(0):
        with bf16:
            loss = cross_entropy(network(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.step()
    network.eval()
    total = count = 0.0
    with torch.no_grad(), bf16:
        for x, y in Batches(data, "test", given.sequences, device=given.device).epoch(0):
            total += float(cross_entropy(network(x), y)) * y.numel()
            count += y.numel()
    return sum(p.numel() for p in parameters), total / count


def main(arguments: list[str] | None = None) -> None:
    """Train all networks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of `petra tokenize`")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3], help="learning rates")
    parser.add_argument("--sequences", type=int, default=128, help="sequences per update (default %(default)s)")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="divide the widths by N, for a CPU")
    parser.add_argument("--smoke", action="store_true", help="tiny networks on the CPU; nothing is stored")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args(arguments)
    if given.smoke:
        vars(given).update(device="cpu", divide=8, lr=[1e-3], sequences=4, seq_len=16)
    found: dict[str, dict[str, float]] = {}
    rows = []
    for name in WIDTHS:
        for lr in given.lr:
            size, loss = train(name, given, lr)
            found.setdefault(name, {"parameters": size})[f"{lr:g}"] = loss
        best = min(value for key, value in found[name].items() if key != "parameters")
        rows.append([name, f"{found[name]['parameters'] / 1e6:.1f}M", f"{best:.4f}"])
    print(render(["embedding and head", "parameters", "test loss"], rows, left=1))
    if not given.smoke:
        widths = {name: width // given.divide for name, width in WIDTHS.items()}
        result = {"widths": widths, "losses": found, "environment": environment()}
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
