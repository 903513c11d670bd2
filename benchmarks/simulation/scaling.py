"""Simulates the training of decoders with 7 and 70 billion parameters on up to 10,000 workers.

Writes SCALING.md and scaling.png next to this file. All assumptions are in the table of SCALING.md.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from petra.schedule import find_schedule
from petra.simulation import Cluster, Cycle, LinkSpeed, StageCosts, simulate, zbv

TOKENS = 4096  # of a micro-batch, one sequence
BATCH = 2500  # sequences of an update, of all replicas
RATE = 0.4 * 989e12
GRAPH = 34  # bytes per token and channel that autograd saves of a block (Korthikanti et al., 2022, flash attention)
CLUSTER = {
    "link": LinkSpeed(5e-6, 450e9),
    "network": LinkSpeed(10e-6, 50e9),
    "node_size": 8,
}
CAPACITY = 80e9


@dataclass(frozen=True)
class Decoder:
    """A decoder like LLaMA 2, whose blocks are all alike."""

    name: str
    blocks: int
    width: int
    hidden: int
    key_width: int
    workers: int
    """Workers of a pipeline."""

    @property
    def parameters(self):
        """Of a block."""
        return 2 * self.width**2 + 2 * self.width * self.key_width + 3 * self.width * self.hidden

    @property
    def flops(self):
        """Of the forward of a block on a micro-batch, with half of the attention scores."""
        return TOKENS * (2 * self.parameters + 2 * TOKENS * self.width)


DECODERS = [Decoder("7B", 32, 4096, 11008, 4096, 8), Decoder("70B", 80, 8192, 28672, 1024, 40)]


@dataclass(frozen=True)
class Method:
    """A way to train: what it computes, saves and sends, in units of a forward, a stream, and a graph."""

    name: str
    schedule: str
    backward: float
    up: int
    down: int
    saved: str
    """The part of each block that is saved: nothing, its input, or its graph."""


METHODS = [
    Method("PETRA", "low-staleness", 3, 2, 4, "nothing"),
    Method("PETRA, lock-step", "lock-step", 3, 2, 4, "nothing"),
    Method("exact reversible 1F1B", "1f1b", 3, 2, 4, "nothing"),
    Method("1F1B, checkpointed", "1f1b", 3, 1, 1, "input"),
    Method("1F1B", "1f1b", 2, 1, 1, "graph"),
    Method("ZBV", "zbv", 2, 1, 1, "graph"),
]


def stage(decoder, method, blocks):
    """Return the costs of a stage of some blocks."""
    stream = 2 * TOKENS * decoder.width  # bfloat16
    forward = blocks * decoder.flops / RATE
    graph = GRAPH * TOKENS * decoder.width
    parameters = blocks * decoder.parameters
    return StageCosts(
        forward=forward,
        backward=method.backward * forward,
        weight=forward,
        forward_bytes=method.up * stream,
        backward_bytes=method.down * stream,
        gradient_bytes=2 * parameters,
        resident_bytes=16 * parameters,
        saved_bytes=blocks * {"nothing": 0, "input": stream, "graph": graph}[method.saved],
        working_bytes=0 if method.saved == "graph" else graph,
    )


def run(decoder, method, replicas, jitter):
    """Return tokens per second and worker, the idle share, and the peak memory of a worker."""
    accumulate = BATCH // replicas
    if method.schedule == "zbv":
        cycle = zbv(decoder.workers, accumulate)
    else:
        cycle = Cycle.of(find_schedule(method.schedule, decoder.workers, accumulate))
    costs = [stage(decoder, method, decoder.blocks // cycle.stages)] * cycle.stages
    found = simulate(cycle, costs, Cluster(**CLUSTER, jitter=jitter), replicas=replicas, updates=5)
    tokens = found.microbatches_per_second * TOKENS / (replicas * decoder.workers)
    return tokens, found.bubble, found.peak_memory.max()


def main(arguments=None):
    """Simulate, and write the table and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jitter", type=float, default=0.03, help="standard deviation of durations, relative")
    parser.add_argument("--most", type=int, default=10_000, help="largest number of workers")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args(arguments)
    began, sections, curves = time.perf_counter(), [], {}
    for decoder in DECODERS:
        replicas = [r for r in (2, 10, 25, 50, 125, 250, 625, 1250) if r * decoder.workers <= options.most]
        for method in METHODS:
            for r in replicas:
                curves[decoder.name, method.name, r * decoder.workers] = run(decoder, method, r, options.jitter)
        sections.append(section(decoder, replicas, curves))
    seconds = time.perf_counter() - began
    text = TEXT.format(
        jitter=f"{options.jitter:.0%}", sections="\n\n".join(sections), count=len(curves), seconds=f"{seconds:.0f}"
    )
    options.out.mkdir(exist_ok=True, parents=True)
    (options.out / "SCALING.md").write_text(text)
    draw(curves, options.out / "scaling.png")
    print(text)


def section(decoder, replicas, curves):
    """Return the tables of a decoder."""
    counts = [r * decoder.workers for r in replicas]
    lines = [
        f"## {decoder.name}, {decoder.workers} workers per pipeline",
        "",
        "Tokens per second and worker, and the idle share:",
        "",
        "| workers | " + " | ".join(map(str, counts)) + " |",
        "| --- |" + " --- |" * len(counts),
        "| micro-batches per update | " + " | ".join(str(BATCH // r) for r in replicas) + " |",
    ]
    for method in METHODS:
        cells = []
        for count in counts:
            tokens, bubble, _ = curves[decoder.name, method.name, count]
            cells.append(f"{tokens:.0f} ({bubble:.0%})")
        lines.append(f"| {method.name} | " + " | ".join(cells) + " |")
    lines += ["", "Peak memory of a worker in GB, messages included:", ""]
    lines += ["| workers | " + " | ".join(map(str, counts)) + " |", "| --- |" + " --- |" * len(counts)]
    for method in METHODS:
        cells = []
        for count in counts:
            size = curves[decoder.name, method.name, count][2]
            cells.append(f"{size / 1e9:.0f}" + ("!" if size > CAPACITY else ""))
        lines.append(f"| {method.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(curves, path):
    """Draw tokens per second and worker against the number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(DECODERS), figsize=(10, 4), layout="constrained")
    for axis, decoder in zip(axes, DECODERS, strict=True):
        for method, marker in zip(METHODS, "^v<soD", strict=True):
            points = [
                (count, *found)
                for (name, own, count), found in curves.items()
                if (name, own) == (decoder.name, method.name)
            ]
            counts, speeds, fits = [p[0] for p in points], [p[1] for p in points], [p[3] <= CAPACITY for p in points]
            (line,) = axis.plot(counts, speeds, marker=marker, label=method.name)
            missing = [(c, v) for c, v, fit in zip(counts, speeds, fits, strict=True) if not fit]
            for point in missing:
                axis.plot(*point, marker=marker, color=line.get_color(), markerfacecolor="white")
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.set_title(f"{decoder.name}, {decoder.workers} workers per pipeline")
        axis.set_xlabel(f"workers, {BATCH} sequences per update")
        axis.set_ylabel("tokens per second and worker")
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


TEXT = """# Decoders with 7 and 70 billion parameters on up to 10,000 workers

Simulated, not measured; written by `python benchmarks/simulation/scaling.py` ({count} simulations in {seconds} s). The
number of sequences per update is the same everywhere, so more replicas mean fewer micro-batches for each pipeline.

![tokens per second and worker](scaling.png)

{sections}

`!`, hollow markers: more than the 80 GB of a worker. The speed is that of workers with enough memory.

## Assumptions

| what | value |
| --- | --- |
| worker | 40 % of 989 TFLOP/s (bfloat16, dense), reached by every action; 80 GB |
| node | 8 workers, 450 GB/s in each direction between any two, 5 µs |
| between nodes | 400 Gb/s = 50 GB/s per worker and direction, 10 µs; pipelines begin at a node |
| jitter | {jitter} standard deviation of every action, log-normal, independent; no stragglers |
| sends | overlap computation; a link carries one message at a time |
| networks | LLaMA 2: 32 blocks of width 4096, and 80 of width 8192 with 8 key-value heads; without embedding and head |
| micro-batch | one sequence of 4096 tokens; 2500 sequences, 10 million tokens, per update |
| arithmetic | forward 1; backward 2; recomputation or reconstruction 1; ZBV: gradients of inputs 1, of weights 1 |
| messages | bfloat16; one stream each way, PETRA and exact reversible: 2 forward, 4 backward |
| memory | 16 bytes per parameter (weights, gradients, Adam); a block's graph 34 bytes per token and channel |
| saved | PETRA, exact reversible: nothing; checkpointed: inputs of all blocks; 1F1B, ZBV: their graphs |
| working | one block's graph while it is recomputed |
| replicas | ring all-reduce of bfloat16 gradients over 50 GB/s at each update of a stage, without overlap |

PETRA's gradients are stale, and its k is the number of micro-batches per update of one pipeline. What that does to the
loss is not simulated: with few micro-batches per update, a delay of a pipeline is a delay of many updates. The
optimizer's arithmetic, the embedding and the head are left out for all methods alike.
"""

if __name__ == "__main__":
    main()
