"""Overhead of the executor: a tick compared with the bare forward and backward computations of its stages.

    python benchmarks/engine_overhead/run.py

Prints a table and writes result.json next to this file.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import petra
from petra.formatting import render
from petra.measure import environment


def bare_tick(network, ups, downs):
    """Run forward and backward of every layer, written by hand, and nothing else."""
    last = len(network) - 1
    for i, layer in enumerate(network):
        if i < last:
            with torch.no_grad():
                layer(*ups[i])
        outputs, gradients = downs[i]
        if isinstance(layer, petra.ReversibleResidual):
            x = outputs[1].detach().requires_grad_()
            residual = layer.f(x)
            outputs[0] - residual.detach()
            found = torch.autograd.grad(residual, [x, *layer.f.parameters()], gradients[0])
            gradients[1] + found[0]
        else:
            inputs = [x.detach().requires_grad_(i > 0) for x in ups[i]]
            y = layer(*inputs)
            wanted = [*(x for x in inputs if x.requires_grad), *layer.parameters()]
            if i == last:
                torch.autograd.grad(cross_entropy(y, gradients), wanted)
            else:
                torch.autograd.grad(y, wanted, gradients)


def messages(network, x, y):
    """Return the messages that each layer would receive from both sides."""
    ups, downs = [(x,)], []
    with torch.no_grad():
        for layer in network:
            outputs = layer(*ups[-1])
            ups.append(outputs if isinstance(outputs, tuple) else (outputs,))
    for outputs in ups[1:-1]:
        downs.append((outputs, [torch.randn_like(o) for o in outputs]))
    return ups, [*downs, (ups[-1], y)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="revnet18")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--schedule", default="low-staleness")
    options = parser.parse_args()
    torch.manual_seed(0)
    network = petra.models.create(options.model, num_classes=10)
    x, y = torch.randn(options.batch_size, 3, 32, 32), torch.randint(10, (options.batch_size,))
    trainer = petra.Trainer(
        network,
        loss=cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, nesterov=True),
        stages=len(network),
        schedule=options.schedule,
    )
    while trainer.executor.microbatches <= trainer.schedule.staleness(0):  # until the pipeline is full
        trainer.step(x, y)
    ups, downs = messages(network, x, y)
    ticks, bare = [], []
    for repeat in range(options.repeats + 1):
        for times, work in ((ticks, lambda: trainer.step(x, y)), (bare, lambda: bare_tick(network, ups, downs))):
            began = time.perf_counter()
            work()
            if repeat:  # the first is warm-up
                times.append(time.perf_counter() - began)
    tick, floor = statistics.median(ticks), statistics.median(bare)
    ratio = tick / floor
    print(
        render(
            ["", "median", "fastest", "slowest"],
            [
                [
                    "tick of the executor, update included",
                    *(f"{f(ticks) * 1e3:.0f} ms" for f in (statistics.median, min, max)),
                ],
                [
                    "bare forward and backward of its stages",
                    *(f"{f(bare) * 1e3:.0f} ms" for f in (statistics.median, min, max)),
                ],
                ["ratio", f"{ratio:.3f}", "", ""],
            ],
        )
    )
    result = {
        **vars(options),
        "tick_seconds": ticks,
        "bare_seconds": bare,
        "ratio": ratio,
        "environment": environment(),
    }
    path = Path(__file__).with_name("result.json")
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
