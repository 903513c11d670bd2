"""Time to a loss: trains a small language model with several pipelines, and measures how long each takes.

    python benchmarks/pipeline_speed/time_to_loss.py --ranks 8 --text input.txt --loss 2.2
    python benchmarks/pipeline_speed/time_to_loss.py --smoke

The model predicts the bytes of a text. All pipelines have the same number of micro-batches per update and see the same
random ones in the same order, so the loss of training is that of data that was not seen before. Those of PyTorch train
the plain twin of the reversible network. All use the same optimizer and warm-up; PETRA may have another learning rate.
The loss is averaged over 16 updates. Every pipeline trains alone for the same time; the clock starts with its first
update, and runs while the pipeline fills. Prints a table and writes a JSON file into the folder results next to this
file.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peer_ranks import PETRA, create, is_plain, loss
from pipelines import Data, PetraPipeline
from ranks import launch
from torch import nn
from torch_schedules import TorchPipeline

from petra.distributed import ProcessTransport
from petra.formatting import render
from petra.measure import environment
from petra.optim import Muon, hidden_matrices, muon_groups

PIPELINES = [
    "petra lock-step",
    "petra low-staleness",
    "reversible 1f1b",
    "torch 1f1b",
    "torch 1f1b checkpointed",
    "torch zbv",
    "torch interleaved-zb",
]
AVERAGED = 16
"""Updates over which the loss is averaged."""


class Text:
    """Random windows of a text: micro-batch n is the same in every pipeline."""

    def __init__(self, text: bytes, batch_size: int, seq_len: int) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._size, self._length = batch_size, seq_len

    def microbatch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets."""
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(len(self._bytes) - self._length, (self._size,), generator=generator)
        windows = torch.stack([self._bytes[start : start + self._length + 1] for start in starts.tolist()])
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def update(self, number: int, size: int) -> Data:
        """Return the micro-batches of an update."""
        return [self.microbatch(number * size + i) for i in range(size)]


def optimizer(
    options: argparse.Namespace, network: nn.Sequential, lr: float
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Return what makes the optimizer of some parameters of the network."""
    hidden = hidden_matrices(network)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if options.optimizer == "muon":
            return Muon(muon_groups(parameters, hidden, weight_decay=0.1), lr)
        return torch.optim.AdamW(parameters, lr, betas=(0.9, 0.95), weight_decay=0.1)

    return make


def cut(options: argparse.Namespace, stages: int) -> list[int]:
    """Return the layers of each stage."""
    layers = [options.blocks * options.ranks // stages] * stages
    layers[0] += 1  # the stem
    layers[-1] += 1  # the head
    return layers


def train(options: argparse.Namespace, name: str, transport: ProcessTransport, group: Any) -> dict[str, Any]:
    """Train one pipeline for a time; return the seconds after each update, and its losses on the last rank."""
    text = Text(options.text.read_bytes(), options.batch_size, options.seq_len)
    size, case = options.microbatches, {**vars(options), "model": "gpt"}
    lr = options.petra_lr if name.startswith("petra") else options.lr
    network = create(case, options.ranks, is_plain(name))
    data = text.update(0, size)
    pipeline: PetraPipeline | TorchPipeline
    if name in PETRA:
        method, schedule, _ = PETRA[name]
        placement = list(range(options.ranks))
        pipeline = PetraPipeline(
            network,
            (cut(options, options.ranks), placement),
            data,
            transport,
            method,
            schedule,
            loss,
            optimizer(options, network, lr),
        )
    else:
        _, kind, *checkpointing = name.split()
        layers = lambda stages: cut(options, stages)  # noqa: E731
        make = optimizer(options, network, lr)
        pipeline = TorchPipeline(network, layers, data, loss, kind, bool(checkpointing), group, make)
    found: list[float] = []
    times: list[float] = []
    over = torch.zeros(1)
    dist.barrier()
    began = time.perf_counter()
    update = 0
    while not over:
        for o in pipeline.optimizers:
            for parameters in o.param_groups:
                parameters["lr"] = lr * min(1.0, (update + 1) / options.warmup)
        data = text.update(update, size)
        if isinstance(pipeline, TorchPipeline):
            pipeline.load(data)
        else:
            pipeline.data = data
        found += pipeline.run(size)
        times.append(time.perf_counter() - began)
        update += 1
        if update % 8 == 0:  # all ranks stop after the same update
            over.fill_(times[-1] > options.seconds)
            dist.broadcast(over, 0, group=group)
    pipeline.settle()
    return {"name": name, "seconds": times, "losses": found, "updates": update}


def measure(options: argparse.Namespace, rank: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Train all pipelines one after another."""
    timeout = timedelta(seconds=options.timeout)
    transport, group = ProcessTransport(timeout=timeout), dist.new_group(timeout=timeout)
    runs = []
    for name in options.schedules:
        say(name)
        run = train(options, name, transport, group)
        found: list[Any] = [None] * options.ranks
        dist.all_gather_object(found, run)
        losses = next(other["losses"] for other in found if other["losses"])
        seconds = [max(at) for at in zip(*(other["seconds"] for other in found), strict=True)]
        rounded = {"seconds": [round(at, 3) for at in seconds], "losses": [round(loss, 4) for loss in losses]}
        runs.append({"name": name, "updates": run["updates"], **rounded})
        if rank == 0:
            print(
                f"{name}: {run['updates']} updates, loss {smoothed(losses, options.microbatches)[-1]:.3f}", flush=True
            )
            options.path.write_text(json.dumps(runs))
    return {}


def smoothed(losses: Sequence[float], size: int) -> list[float]:
    """Return the mean loss of the last updates, after each update."""
    updates = torch.tensor(losses[: len(losses) // size * size]).view(-1, size).mean(1)
    sums = torch.cat([torch.zeros(1), updates.cumsum(0)])
    count = torch.arange(1, len(updates) + 1).clamp(max=AVERAGED)
    ends = torch.arange(1, len(updates) + 1)
    return ((sums[ends] - sums[ends - count]) / count).tolist()


def reached(run: dict[str, Any], target: float, size: int) -> tuple[int, float] | None:
    """Return the update and the seconds at which a loss was reached; None if it was not."""
    losses = smoothed(run["losses"], size)
    found = next((i for i, loss in enumerate(losses) if loss <= target and i >= AVERAGED - 1), None)
    if found is None:
        return None
    late = run["updates"] - len(losses)  # what is in flight at the end
    return found + 1, run["seconds"][min(found + late, len(run["seconds"]) - 1)]


def report(runs: Sequence[dict[str, Any]], target: float, size: int) -> str:
    """Return a table."""
    rows = []
    for run in runs:
        losses, at = smoothed(run["losses"], size), reached(run, target, size)
        per_update = 1e3 * (run["seconds"][-1] - run["seconds"][0]) / max(1, run["updates"] - 1)
        cells = [run["name"], f"{per_update:.0f}", str(run["updates"]), f"{losses[-1]:.3f}"]
        rows.append([*cells, *((str(at[0]), f"{at[1]:.1f}") if at else ("", "not reached"))])
    header = ["pipeline", "ms per update", "updates", "last loss", f"updates to {target:g}", "seconds"]
    return render(header, rows, left=1)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--text", type=Path, help="the text file")
    parser.add_argument("--loss", type=float, default=2.0, help="nats per byte (default: 2.0)")
    parser.add_argument("--seconds", type=float, default=60, help="of training of each pipeline (default: 60)")
    parser.add_argument("--schedules", nargs="+", choices=PIPELINES, default=PIPELINES, metavar="NAME")
    parser.add_argument("--microbatches", type=int, default=8, help="per update (default: 8)")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=2, help="blocks of each rank, an even number (default: 2)")
    parser.add_argument("--batch-size", type=int, default=4, help="texts of a micro-batch (default: 4)")
    parser.add_argument("--seq-len", type=int, default=64, help="bytes of a text (default: 64)")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--petra-lr", type=float, default=2e-3, help="learning rate of PETRA")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--warmup", type=int, default=50, help="updates")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank")
    parser.add_argument("--no-onednn", action="store_true", help="PyTorch's own kernels")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that a rank waits for another")
    parser.add_argument("--limit", type=float, default=560, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--smoke", action="store_true", help="tiny, on two ranks and this file; stores nothing")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.ranks, options.width, options.seconds, options.seq_len, options.microbatches = 2, 32, 0.5, 16, 4
        options.text, options.schedules = Path(__file__), ["petra lock-step", "reversible 1f1b", "torch zbv"]
        options.loss = 5.0
    if options.text is None:
        parser.error("--text is missing: give a text file, such as the works of Shakespeare")
    with tempfile.TemporaryDirectory() as folder:
        options.path = Path(folder) / "runs.json"
        launch(options, measure)
        runs = json.loads(options.path.read_text())
    print(report(runs, options.loss, options.microbatches))
    if not options.smoke:
        where = environment()
        settings = {key: value for key, value in vars(options).items() if key not in ("out", "path", "text", "smoke")}
        options.out.mkdir(exist_ok=True, parents=True)
        path = options.out / f"{where['machine']}-{where['cores']}-cores-time-to-loss-{options.ranks}-ranks.json"
        path.write_text(json.dumps({**settings, "environment": where, "runs": runs}) + "\n")


if __name__ == "__main__":
    main()
