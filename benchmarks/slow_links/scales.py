"""Rounding errors of messages for values that share a scale: all, a channel, a row, or blocks of a few.

    python benchmarks/slow_links/scales.py

Trains the networks of losses.py with PETRA for some steps, and rounds the last messages of all boundaries in every way.
Prints the relative errors, and writes scales.json.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import losses
import torch

import petra
from petra.formatting import render
from petra.measure import environment

TYPES = {"int8": (torch.int8, 127.0), "e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
GROUPS = ("message", "channel", "row", "block of 128", "block of 64", "block of 32")
"""A row: the features of a token, or a channel of an image."""


def grouped(x, group):
    """Return the values as a matrix whose rows share a scale."""
    if group.startswith("block"):
        size = int(group.split()[-1])
        flat = x.flatten()
        return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)
    if group == "message":
        return x.reshape(1, -1)
    if group == "channel":
        return (x.transpose(0, 1) if x.ndim == 4 else x.movedim(-1, 0)).flatten(1)
    return x.flatten(0, 1).flatten(1)


def error(x, group, kind):
    """Return the relative error of rounding."""
    dtype, largest = TYPES[kind]
    rows = grouped(x, group)
    scales = rows.abs().amax(1, keepdim=True) / largest
    ratios = rows / torch.where(scales > 0, scales, 1)
    rounded = (ratios if dtype.is_floating_point else ratios.round()).to(dtype).float() * scales
    return float((rounded - rows).norm() / rows.norm())


def measure(network, steps):
    """Return the mean error over the last messages of all boundaries, by kind of message, group and type."""
    torch.manual_seed(0)
    model, batches, _, optimizer = losses.task(network, "petra")
    trainer = petra.Trainer(
        model, loss=losses.loss_of, optimizer=optimizer, stages=len(model), method="petra", clip_norm=1.0
    )
    mailbox, seen = trainer.executor.mailbox, {}
    forward, backward = mailbox.send_forward, mailbox.send_backward

    def send_forward(action, streams):
        seen["streams", action.stage] = streams
        forward(action, streams)

    def send_backward(action, message):
        seen["gradients", action.stage] = message.gradients
        backward(action, message)

    mailbox.send_forward, mailbox.send_backward = send_forward, send_backward
    for x, y in batches(steps, 0):
        trainer.step(x, y)
    found = defaultdict(list)
    for (what, _), tensors in seen.items():
        for x in tensors:
            if x is not None and x.norm() > 0:
                found[what, "cast", "bf16"].append(float((x.bfloat16().float() - x).norm() / x.norm()))
                for group in GROUPS:
                    for kind in TYPES:
                        found[what, group, kind].append(error(x, group, kind))
    return [
        {"network": network, "messages": what, "scale": group, "type": kind, "error": fmean(values)}
        for (what, group, kind), values in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="(default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="FOLDER")
    options = parser.parse_args()
    torch.set_num_threads(1)
    errors = [one for network in losses.NETWORKS for one in measure(network, options.steps)]
    known = {"steps": options.steps, "errors": errors, "environment": environment(torch.device("cpu"))}
    (options.out / "scales.json").write_text(json.dumps(known, indent=2) + "\n")
    columns = [(n, w) for n in losses.NETWORKS for w in ("streams", "gradients")]
    values = {(e["network"], e["messages"], e["type"], e["scale"]): e["error"] for e in errors}
    kinds = [("bf16", "cast"), *((kind, group) for kind in TYPES for group in GROUPS)]
    rows = [[kind, group, *(f"{values[n, w, kind, group]:.2%}" for n, w in columns)] for kind, group in kinds]
    print(render(["type", "scale for", *(f"{n}, {w}" for n, w in columns)], rows))


if __name__ == "__main__":
    main()
