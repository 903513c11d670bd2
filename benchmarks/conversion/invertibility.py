"""The error of reconstruction through converted blocks, by depth and blend.

    python benchmarks/conversion/invertibility.py

Converts transformers with random weights, pre-norm and post-norm, with coupling "midpoint", and compares gradients of
reversible backprop in float32 blocks with those of plain autograd. Prints a table and writes invertibility.json.
"""

import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import gelu

import petra
from petra.conversion import blended
from petra.formatting import render
from petra.measure import environment


def error(depth: int, blend: float, norm_first: bool) -> float:
    """Return the largest difference of gradients, relative to the largest gradient."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, gelu, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    for parameter in encoder.parameters():
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)
    network = petra.make_reversible(encoder, coupling="midpoint", blend=blend)
    x = torch.randn(4, 16, 64)
    weight = torch.randn(4, 16, 64)

    def gradients():
        x_ = x.clone().requires_grad_()
        (network(x_) * weight).sum().backward()
        found = [x_.grad, *(p.grad.clone() for p in network.parameters())]
        network.zero_grad()
        return torch.cat([g.flatten() for g in found])

    reversible = gradients()
    with petra.plain_autograd():
        plain = gradients()
    return float((reversible - plain).abs().max() / plain.abs().max())


def main() -> None:
    blended._EXACT_BITS = blended._ROUNDED_BITS = 1000  # no limit
    rows, results = [], []
    for norm_first in (True, False):
        for depth in (6, 12, 24, 48):
            row = [f"{depth}, {'pre' if norm_first else 'post'}-norm"]
            for blend in (0.1, 0.25, 0.5, 0.75, 1.0):
                found = error(depth, blend, norm_first)
                row.append(f"{found:.0e}")
                results.append({"depth": depth, "norm_first": norm_first, "blend": blend, "error": found})
            rows.append(row)
    print(render(["blocks", "0.1", "0.25", "0.5", "0.75", "1"], rows))
    path = Path(__file__).with_name("invertibility.json")
    path.write_text(json.dumps({"results": results, "environment": environment()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
