"""Draws the results of run.py: throughput and memory against batch size, memory against depth.

    python benchmarks/reversible/plots.py results/speed.json results/depth.json

Writes a figure for every model of the case speed (as Figures 5, 6 and 7 of the PaReprop paper), one for the case depth,
and a timeline for every row of the case overlap, next to the given files.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

GIB = 2**30


def speed(rows: list[dict[str, Any]], stem: Path) -> None:
    """Throughput and peak memory of each model against batch size, one line per way."""
    for model in dict.fromkeys(row["model"] for row in rows):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
        lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            if row["model"] == model and row["peak"] is not None:
                lines[row["way"]].append(row)
        for way, points in lines.items():
            sizes = [point["batch"] for point in points]
            left.plot(sizes, [point["batch"] / point["seconds"] for point in points], marker="o", label=way)
            right.plot(sizes, [point["peak"] / GIB for point in points], marker="o", label=way)
        for axes, what in ((left, "samples per second"), (right, "peak memory (GiB)")):
            axes.set(xlabel="batch", ylabel=what, xscale="log")
            axes.grid(alpha=0.3)
        left.legend(fontsize="small")
        figure.suptitle(model)
        figure.savefig(stem.with_name(f"{stem.name}-{model}.png"), dpi=150)
        pyplot.close(figure)


def depth(rows: list[dict[str, Any]], stem: Path) -> None:
    """Memory of activations against the number of blocks, one line per way."""
    figure, axes = pyplot.subplots(figsize=(5, 3.5), layout="constrained")
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if "vit" in row["model"]:
            lines[row["way"]].append(row)
    for way, points in lines.items():
        axes.plot([p["depth"] for p in points], [p["activations"] / GIB for p in points], marker="o", label=way)
    axes.set(xlabel="blocks", ylabel="activations (GiB)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(stem.with_suffix(".png"), dpi=150)
    pyplot.close(figure)


def timelines(rows: list[dict[str, Any]], stem: Path, milliseconds: float = 2.0) -> None:
    """Kernels of a short interval of a step: one line per CUDA stream, one figure per row with kernels."""
    for row in rows:
        if not row.get("kernels"):
            continue
        figure, panels = pyplot.subplots(2, 1, figsize=(10, 3.5), layout="constrained")
        for axes, (way, kernels) in zip(panels, row["kernels"].items(), strict=True):
            streams = sorted({stream for stream, _, _ in kernels})
            begin = (min(start for _, start, _ in kernels) + max(end for _, _, end in kernels)) * 0.6 / 1e6
            for number, stream in enumerate(streams):
                bars = [(start / 1e6, (end - start) / 1e6) for own, start, end in kernels if own == stream]
                axes.broken_barh(bars, (number - 0.4, 0.8), edgecolor="white", linewidth=0.2)
            busy = row["busy"][way]
            axes.set(xlim=(begin, begin + milliseconds), yticks=range(len(streams)), title=f"{way}: {busy:.1%} busy")
            axes.set_yticklabels([f"stream {number}" for number in range(len(streams))])
        panels[-1].set_xlabel("milliseconds of a step")
        name = f"{row['model']}-{row['batch']}{row['extras']}"
        figure.suptitle(name)
        figure.savefig(stem.with_name(f"{stem.name}-{name}.png"), dpi=150)
        pyplot.close(figure)


DRAWN = {"speed": speed, "depth": depth, "overlap": timelines}


def main() -> None:
    """Draw the given files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    for file in parser.parse_args().files:
        result = json.loads(file.read_text())
        DRAWN[result["case"]](result["rows"], file.with_suffix(""))


if __name__ == "__main__":
    main()
