"""Time and memory of training steps of reversible networks on one GPU.

    python benchmarks/reversible/run.py --case speed
    python benchmarks/reversible/run.py --case speed --models rev-vit-l --batch-sizes 64 --ways backprop reversible
    python benchmarks/reversible/run.py --smoke

A step is forward, backward and a fused AdamW update on random data. All ways of a model are measured in one run, on the
same machine. Prints a table and writes a file into the folder results next to this file.

Ways:
- twin: ordinary backprop on the plain twin, the network of the same name without "rev-"
- backprop: backprop on the reversible network, with stored activations
- reversible: activations are reconstructed
- pareprop: the same, with reconstruction and gradient computation overlapped on two CUDA streams
"+compile" compiles residual functions and other layers, "+cuda-graph" captures segments of reversible layers as CUDA
graphs.

Cases:
- speed: milliseconds per step and peak memory for models, batch sizes and ways
- depth: peak memory of activations for growing numbers of blocks, and seconds per layer of very deep RevNets
- overlap: pareprop relative to reversible, with alternating steps on the same network, plain and with the extras of
  --with; and the share of a step in which the GPU is busy, from a timeline of its kernels
- budget: the largest batch and the best throughput within --gib of memory
"""

import argparse
import json
from pathlib import Path

import torch
from cases import budget, depth, speed
from overlap import overlap

from petra.measure import environment

CASES = {"speed": speed, "depth": depth, "overlap": overlap, "budget": budget}
WAYS = ["backprop+compile", "reversible", "reversible+compile+cuda-graph", "pareprop", "pareprop+compile+cuda-graph"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="speed")
    parser.add_argument("--smoke", action="store_true", help="tiny, also on a CPU; stores nothing")
    parser.add_argument("--models", nargs="+", default=["rev-vit-b", "rev-vit-l", "rev-swin-b"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="default: 64; in the case budget, 8 and more")
    parser.add_argument("--ways", nargs="+", default=WAYS, metavar="WAY", help="as listed above")
    parser.add_argument("--precision", choices=("amp", "tf32"), default="amp", help="bf16 autocast, or TF32")
    parser.add_argument("--steps", type=int, default=10, help="timed steps, after some to warm up")
    parser.add_argument("--gib", type=float, default=16, help="memory of the case budget")
    parser.add_argument(
        "--with", dest="extras", nargs="+", default=["", "+compile+cuda-graph"], help="extras of the case overlap"
    )
    parser.add_argument("--timelines", action="store_true", help="in the case overlap, store every kernel for plots.py")
    parser.add_argument("--name", help="name of the file with results (default: the case)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cpu" and not options.smoke:
        raise SystemExit("no GPU was found: only --smoke runs without one")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for name in CASES if options.smoke else [options.case]:
        asked = {key: value for key, value in vars(options).items() if key != "out"}
        result = {**asked, "environment": environment(torch.device(options.device)), "rows": []}
        for row in CASES[name](options):
            result["rows"].append(row)
            if not options.smoke:  # after every row, because a run may be stopped
                options.out.mkdir(exist_ok=True, parents=True)
                (options.out / f"{options.name or name}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
