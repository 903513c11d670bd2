"""Time and memory of AdamW, NAdamW, Muon and SOAP: a reversible GPT in a PETRA pipeline on one GPU.

    python benchmarks/optimizers/run.py                 # 125M parameters: width 768, depth 12, 8 stages, k = 8
    python benchmarks/optimizers/run.py --optimizers adamw adamw:bf16 adamw:8bit     # smaller moments
    python benchmarks/optimizers/run.py --smoke         # tiny, on the CPU, to see that it works; stores nothing

An update is k ticks, of which the last includes the step of every stage. On a GPU, ticks are captured, except with
adamw:8bit of torchao. The optimizers take turns, one block of updates at a time. At the end, the steps of all stages
are timed alone, one kernel at a time. Prints a table, and writes it with all times to result.json next to this file.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import petra
from petra.formatting import mebibytes, render
from petra.measure import at_rest, environment
from petra.optim import hidden_matrices
from petra.trainer import cross_entropy, optimizers

NAMES = ("adamw", "nadamw", "muon", "soap")
STATES = ("adamw:bf16", "adamw:8bit")
SMOKE = {"width": 16, "depth": 2, "heads": 2, "vocab_size": 32, "seq_len": 8, "batch_size": 2, "stages": 3}


def build(name: str, given: argparse.Namespace) -> petra.Trainer:
    """Return a trainer of the network with one optimizer."""
    torch.manual_seed(0)
    sizes = {key: getattr(given, key) for key in ("width", "depth", "heads", "vocab_size", "seq_len")}
    network = petra.models.create("rev-gpt", chunked_loss=True, **sizes).to(given.device)
    name, _, state = name.partition(":")
    more = {"hidden": hidden_matrices(network)} if name == "muon" else {}
    more |= {"state": state} if state else {}

    def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return getattr(optimizers, name)(parameters, lr=3e-4, weight_decay=0.1, **more)

    return petra.Trainer(
        network,
        loss=cross_entropy,
        optimizer=optimizer,
        stages=given.stages,
        accumulate=given.accumulate,
        autocast=torch.bfloat16 if given.autocast == "bf16" else None,
        corrections=given.corrections.split(",") if given.corrections else (),
        device=given.device,
        cuda_graph=True if given.device == "cuda" and state != "8bit" else None,
    )


def seconds(trainer: petra.Trainer, batches: list[tuple[torch.Tensor, torch.Tensor]], ticks: int) -> float:
    """Return the time of some ticks, with the device synchronized at both ends."""
    synchronize(trainer.device)
    began = time.perf_counter()
    for tick in range(ticks):
        trainer.step(*batches[tick % len(batches)])
    synchronize(trainer.device)
    return time.perf_counter() - began


def steps(trainer: petra.Trainer, repeats: int) -> tuple[float, int | None]:
    """Return the time of one step of all stages, and on a GPU the bytes that it needs meanwhile."""
    found = [stage.optimizer for stage in trainer.stages if stage.optimizer is not None]
    for parameter in trainer.network.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    before, on_gpu = 0, trainer.device.type == "cuda"
    for repeat in range(repeats + 1):
        if repeat == 1:  # after one to warm up
            synchronize(trainer.device)
            began = time.perf_counter()
        if on_gpu and repeat == repeats:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for optimizer in found:
            optimizer.step()
    synchronize(trainer.device)
    spent = (time.perf_counter() - began) / repeats
    for parameter in trainer.network.parameters():
        parameter.grad = None
    return spent, torch.cuda.max_memory_allocated() - before if on_gpu else None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 768), ("depth", 12), ("heads", 12), ("vocab-size", 32768), ("seq-len", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch-size", type=int, default=8, help="texts in a micro-batch (default: 8)")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=8, help="k, micro-batches per update (default: 8)")
    parser.add_argument("--updates", type=int, default=10, help="updates in a block (default: 10)")
    parser.add_argument("--blocks", type=int, default=5, help="blocks after one of warm-up (default: 5)")
    parser.add_argument("--optimizers", nargs="+", choices=(*NAMES, *STATES), default=NAMES)
    parser.add_argument("--corrections", default="", help="such as predict:2")
    parser.add_argument("--autocast", choices=("bf16", "none"), default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU; nothing is stored")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    given = parser.parse_args(arguments)
    if given.smoke:
        vars(given).update(SMOKE, device="cpu", updates=1, blocks=1, accumulate=2, autocast="none")
    return given


def main(arguments: list[str] | None = None) -> None:
    given = options(arguments)
    device = torch.device(given.device)
    trainers = {name: build(name, given) for name in given.optimizers}
    shape = (given.batch_size, given.seq_len)
    batches = [tuple(torch.randint(given.vocab_size, shape, device=device) for _ in "xy") for _ in range(4)]
    warm_up = trainers[given.optimizers[0]].schedule.staleness(0) + 4 * given.accumulate
    blocks: dict[str, list[float]] = {name: [] for name in trainers}
    for trainer in trainers.values():  # until the pipeline is full and its ticks are captured
        seconds(trainer, batches, warm_up - warm_up % given.accumulate)
    for block in range(given.blocks + 1):
        for name, trainer in trainers.items():
            spent = seconds(trainer, batches, given.updates * given.accumulate) / given.updates
            if block:
                blocks[name].append(1e3 * spent)
    medians = {name: statistics.median(times) for name, times in blocks.items()}
    base = medians.get("adamw", next(iter(medians.values())))
    captured = {name: getattr(t.executor.capture, "captured_ticks", 0) for name, t in trainers.items()}
    held = {name: sum(row.optimizer for row in at_rest(trainer.executor)) for name, trainer in trainers.items()}
    alone = {name: steps(trainer, given.updates) for name, trainer in trainers.items()}
    rows = [
        [
            name,
            f"{ms:.2f}",
            f"{min(blocks[name]):.2f}",
            f"{max(blocks[name]):.2f}",
            f"{ms / base:.3f}",
            captured[name],
            mebibytes(held[name]),
            f"{1e3 * alone[name][0]:.2f}",
        ]
        for name, ms in medians.items()
    ]
    header = ["optimizer", "ms per update", "fastest", "slowest", "ratio", "captured ticks", "state", "ms per step"]
    print(render(header, rows, left=1))
    for name, trainer in trainers.items():
        if trainer.ineligible_reason is not None:
            print(f"{name} was not captured: {trainer.ineligible_reason}")
    if given.smoke:
        return
    settings = {key: value for key, value in vars(given).items() if key not in ("out", "smoke")}
    parameters = sum(p.numel() for p in next(iter(trainers.values())).network.parameters())
    result = {
        **settings,
        "parameters": parameters,
        "milliseconds": blocks,
        "median": medians,
        "captured_ticks": captured,
        "state_bytes": held,
        "step_milliseconds": {name: 1e3 * spent for name, (spent, _) in alone.items()},
        "step_peak_bytes": {name: peak for name, (_, peak) in alone.items()},
        "environment": environment(device),
    }
    given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
