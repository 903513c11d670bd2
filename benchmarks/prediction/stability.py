"""The largest stable curvature of a quadratic loss for a stage with delayed gradients: theory, computed exactly.

    python benchmarks/prediction/stability.py
    python benchmarks/prediction/stability.py --accumulate 8 --in-flight 4 9 17 --corrections none predict,inertia:4

One weight, a loss of curvature h, SGD with momentum m, k micro-batches per update and n of them in flight. A gradient
is that of the weights of its forward. The map from update to update is linear, and stable as long as no eigenvalue
exceeds 1 in absolute value. The table has the largest stable h·lr/(1 - m)/k. It is per micro-batch, so that different k
can be compared, whose learning rates are proportional to k. `none` is no correction. Prints a table and writes
results/stability.json.
"""

import argparse
import json
from pathlib import Path

import torch

from petra.formatting import render
from petra.measure import environment


def update_map(curvature, n, k, m, corrections, nesterov):
    """Return an update as a matrix, with lr = 1 - m; the state is weight and velocity now and 1, 2, … updates ago."""
    names = dict(name.partition(":")[::2] for name in corrections.split(",") if name != "none")
    if "inertia" in names:
        m = 1 - 1 / max(1 / (1 - m), float(names["inertia"] or 1) * n**2 / k)
    size = -(-n // k) + 1
    gradient = torch.zeros(2 * size, dtype=torch.float64)
    for j in range(k):  # the forward of micro-batch j of this update was d updates ago
        d = max(-((j - n) // k), 0)
        gradient[d] += curvature / k
        gradient[size + d] -= curvature / k * (1 - m) * (_ahead(d, m, names, nesterov) if n >= k else 0)
    velocity = gradient.clone()
    velocity[size] += m
    step = gradient + m * velocity if nesterov else velocity
    update = torch.zeros(2 * size, 2 * size, dtype=torch.float64)
    update[0], update[size] = -(1 - m) * step, velocity
    update[0, 0] += 1
    for i in range(1, size):
        update[i, i - 1] = update[size + i, size + i - 1] = 1
    return update


def _ahead(d, m, names, nesterov):
    """The multiple of lr·v by which the forward looks ahead."""
    if "predict" in names:
        return d
    if "coast" not in names:
        return 0
    r = float(names["coast"] or m)
    return sum(r**i for i in range(1, d + 1)) * (r if nesterov else 1)


def limit(n, k, m, corrections, nesterov):
    """Return the largest stable curvature times lr/(1 - m)/k, to one part in a thousand."""

    def stable(curvature):
        return torch.linalg.eigvals(update_map(curvature, n, k, m, corrections, nesterov)).abs().max() <= 1 + 1e-9

    low = high = 1e-6
    while stable(high):
        low, high = high, high * 1.1
    while high / low > 1.001:
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low / k


DEFAULT = ["none", "predict", "coast", "inertia:4", "predict,inertia:1", "predict,inertia:4"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accumulate", nargs="+", type=int, metavar="K", default=[1, 8], help="(default 1 8)")
    parser.add_argument("--in-flight", nargs="+", type=int, metavar="N", default=[0, 2, 4, 9, 17, 34])
    parser.add_argument("--momentum", type=float, default=0.9, help="(default %(default)s)")
    parser.add_argument("--no-nesterov", dest="nesterov", action="store_false")
    parser.add_argument(
        "--corrections", nargs="+", default=DEFAULT, help="none, or predict, coast and inertia separated by commas"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    names = {name.partition(":")[0] for corrections in options.corrections for name in corrections.split(",")}
    if unknown := names - {"none", "predict", "coast", "inertia"}:
        parser.error(
            f"--corrections has {', '.join(sorted(unknown))}: the theory covers only predict, coast and inertia"
        )
    if not 0 < options.momentum < 1 or min(options.accumulate) < 1 or min(options.in_flight) < 0:
        parser.error("--momentum must be between 0 and 1, --accumulate 1 or more, --in-flight 0 or more")
    rows, limits = [], {}
    for k in options.accumulate:
        for corrections in options.corrections:
            found = [limit(n, k, options.momentum, corrections, options.nesterov) for n in options.in_flight]
            limits[f"k {k}, {corrections}"] = dict(zip(options.in_flight, found, strict=True))
            rows.append([f"{k}", corrections, *(f"{value:.3f}" for value in found)])
    print(render(["k", "corrections", *(f"n = {n}" for n in options.in_flight)], rows))
    result = {"momentum": options.momentum, "nesterov": options.nesterov, "limits": limits}
    result["environment"] = environment(torch.device("cpu"))
    options.out.mkdir(exist_ok=True)
    (options.out / "stability.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
