"""One method on one GPU, in a process of its own: makes its ticks and times them when it is told to.

Reads lines from standard input, each the number of ticks of a block, and answers with a line of JSON each: seconds of
the block. An empty line, or the end, asks for memory and ends the process.
"""

import argparse
import json
import sys
import time

import torch
from torch.nn.functional import cross_entropy

import petra

CUDA = torch.cuda.is_available()


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--method", required=True, help="NAME[@ORDER][/STAGES]")
    parser.add_argument("--device", required=True)
    parser.add_argument("--width", type=int)
    parser.add_argument("--capture", action="store_true")
    parser.add_argument("--autocast", choices=("bf16",))
    parser.add_argument("--messages", choices=("bf16",))
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--benchmark", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    return parser.parse_args(arguments)


def parse(method: str) -> tuple[str, str | None, int | None]:
    """``petra@low-staleness/5`` in its three parts; pipelined methods are in lock-step unless it says otherwise."""
    rest, _, stages = method.partition("/")
    name, _, order = rest.partition("@")
    pipelined = petra.methods.find(name).pipelined
    return name, (order or "lock-step") if pipelined else None, int(stages) if stages else None


def sgd(parameters) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, 1e-3, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=CUDA)


def make(given: argparse.Namespace) -> petra.Trainer:
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = given.benchmark
    torch.backends.cudnn.deterministic = given.deterministic
    width = {} if given.width is None else {"width": given.width}
    network = petra.models.create(given.model, num_classes=10, **width).to(given.device)
    if given.channels_last:
        network = network.to(memory_format=torch.channels_last)
    name, order, stages = parse(given.method)
    bf16 = {"bf16": torch.bfloat16, None: None}
    return petra.Trainer(
        network,
        loss=cross_entropy,
        optimizer=sgd,
        method=name,
        stages=stages or len(network),
        order=order,
        autocast=bf16[given.autocast],
        message_dtype=bf16[given.messages],
        device=given.device,
        **({"capture": True} if given.capture else {}),
    )


def batches(given: argparse.Namespace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A few micro-batches of random images, on the device."""
    layout = torch.channels_last if given.channels_last else torch.contiguous_format
    size = given.batch_size
    return [
        (
            torch.randn(size, 3, 32, 32, device=given.device).contiguous(memory_format=layout),
            torch.randint(10, (size,), device=given.device),
        )
        for _ in range(4)
    ]


def synchronise() -> None:
    if CUDA:
        torch.cuda.synchronize()


def until_steady(trainer: petra.Trainer) -> int:
    """Ticks until the pipeline is full, each micro-batch in flight has seen other weights, and ticks are recorded."""
    return 2 * trainer.order.staleness(0) + 10


def say(**what) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    given = options()
    trainer, data = make(given), batches(given)
    ticks = 0

    def run(count: int) -> float:
        nonlocal ticks
        synchronise()
        began = time.perf_counter()
        for _ in range(count):
            trainer.step(*data[ticks % len(data)])
            ticks += 1
        synchronise()
        return time.perf_counter() - began

    run(until_steady(trainer))
    executor = trainer.executor
    say(
        stages=len(trainer.stages),
        order=trainer.order.name,
        replayed=getattr(executor, "replayed", 0),
        refusal=getattr(executor, "refusal", None),
    )
    for line in sys.stdin:
        if not line.strip():
            break
        say(seconds=run(int(line)))
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if CUDA else (0, 0)
    say(peak_allocated=peaks[0], peak_reserved=peaks[1], replayed=getattr(executor, "replayed", 0))


if __name__ == "__main__":
    main()
