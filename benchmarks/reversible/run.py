"""Training steps of reversible networks on one GPU: how long they take and how much memory they need.

    python benchmarks/reversible/run.py --case speed
    python benchmarks/reversible/run.py --case speed --models rev-vit-l --batch-sizes 64 --ways backprop reversible
    python benchmarks/reversible/run.py --smoke

A step is forward, backward and a fused AdamW update on random data. All ways of a model are measured in one run, on the
same machine. Prints a table and writes a file into results/ beside this file.

Ways:
- twin: ordinary backprop on the plain twin, the network of the same name without "rev-"
- backprop: the same reversible network, activations stored
- reversible: activations reconstructed
- pareprop: the same, reconstruction beside gradients on two CUDA streams
Each with residual functions and other layers compiled ("+compile"), and runs replayed as CUDA graphs ("+capture").

Cases:
- speed: milliseconds a step and peak memory over models, batch sizes and ways
- depth: peak memory of activations against the number of blocks, and seconds per layer of very deep RevNets
- overlap: pareprop over reversible, steps by turns on the same network, as it is and with what --with adds; and
  how much of a step the GPU is busy, from a timeline of its kernels
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
WAYS = ["backprop+compile", "reversible", "reversible+compile+capture", "pareprop", "pareprop+compile+capture"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="speed")
    parser.add_argument("--smoke", action="store_true", help="tiny, also on a CPU; nothing is kept")
    parser.add_argument("--models", nargs="+", default=["rev-vit-b", "rev-vit-l", "rev-swin-b"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="default 64; budget tries 8 and more")
    parser.add_argument("--ways", nargs="+", default=WAYS, metavar="WAY", help="as listed above")
    parser.add_argument("--precision", choices=("amp", "tf32"), default="amp", help="bf16 autocast, or TF32")
    parser.add_argument("--steps", type=int, default=10, help="that are timed, after as many as it takes to warm up")
    parser.add_argument("--gib", type=float, default=16, help="memory of the case budget")
    parser.add_argument(
        "--with", dest="extras", nargs="+", default=["", "+compile+capture"], help="of the case overlap"
    )
    parser.add_argument("--timelines", action="store_true", help="of the case overlap: keep every kernel, to be drawn")
    parser.add_argument("--name", help="of the file with results (default: the case)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cpu" and not options.smoke:
        raise SystemExit("there is no GPU here: only --smoke runs without one")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for name in CASES if options.smoke else [options.case]:
        asked = {key: value for key, value in vars(options).items() if key != "out"}
        result = {**asked, "environment": environment(torch.device(options.device)), "rows": []}
        for row in CASES[name](options):
            result["rows"].append(row)
            if not options.smoke:  # after every row, for a run may be stopped
                options.out.mkdir(exist_ok=True, parents=True)
                (options.out / f"{options.name or name}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
