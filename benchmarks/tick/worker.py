"""One method on one GPU in its own process, which runs and times blocks of ticks on request.

Each line of standard input is the number of ticks of a block, answered with a line of JSON: the seconds of the block.
After an empty line, or at the end of the input, the process reports its memory and ends.
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
    parser.add_argument("--method", required=True, help="NAME[@SCHEDULE][/STAGES]")
    parser.add_argument("--device", required=True)
    parser.add_argument("--width", type=int)
    parser.add_argument("--cuda-graph", action="store_true")
    parser.add_argument("--autocast", choices=("bf16",))
    parser.add_argument("--comm-dtype", choices=("bf16",))
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--cudnn-benchmark", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    return parser.parse_args(arguments)


def parse(method: str) -> tuple[str, str | None, int | None]:
    """Split `petra@low-staleness/5` into its three parts; the default schedule of pipelined methods is lock-step."""
    rest, _, stages = method.partition("/")
    name, _, schedule = rest.partition("@")
    pipelined = petra.methods.find(name).pipelined
    return name, (schedule or "lock-step") if pipelined else None, int(stages) if stages else None


def sgd(parameters) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, 1e-3, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=CUDA)


def make(given: argparse.Namespace) -> petra.Trainer:
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = given.cudnn_benchmark
    torch.backends.cudnn.deterministic = given.deterministic
    width = {} if given.width is None else {"width": given.width}
    network = petra.models.create(given.model, num_classes=10, **width).to(given.device)
    if given.channels_last:
        network = network.to(memory_format=torch.channels_last)
    name, schedule, stages = parse(given.method)
    bf16 = {"bf16": torch.bfloat16, None: None}
    return petra.Trainer(
        network,
        loss=cross_entropy,
        optimizer=sgd,
        method=name,
        stages=stages or len(network),
        schedule=schedule,
        autocast=bf16[given.autocast],
        comm_dtype=bf16[given.comm_dtype],
        device=given.device,
        **({"cuda_graph": True} if given.cuda_graph else {}),
    )


def batches(given: argparse.Namespace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a few micro-batches of random images on the device."""
    layout = torch.channels_last if given.channels_last else torch.contiguous_format
    size = given.batch_size
    return [
        (
            torch.randn(size, 3, 32, 32, device=given.device).contiguous(memory_format=layout),
            torch.randint(10, (size,), device=given.device),
        )
        for _ in range(4)
    ]


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def until_steady(trainer: petra.Trainer) -> int:
    """Return the ticks until the pipeline is full, all micro-batches saw different weights, and ticks are captured."""
    return 2 * trainer.schedule.staleness(0) + 10


def capture_state(trainer: petra.Trainer) -> dict:
    """Return the number of captured ticks so far, and the reason if ticks cannot be captured."""
    capture = trainer.executor.capture
    return {
        "captured_ticks": 0 if capture is None else capture.captured_ticks,
        "ineligible_reason": None if capture is None else capture.ineligible_reason,
    }


def say(**what) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    given = options()
    trainer, data = make(given), batches(given)
    ticks = 0

    def run(count: int) -> float:
        nonlocal ticks
        synchronize()
        began = time.perf_counter()
        for _ in range(count):
            trainer.step(*data[ticks % len(data)])
            ticks += 1
        synchronize()
        return time.perf_counter() - began

    run(until_steady(trainer))
    say(stages=len(trainer.stages), schedule=trainer.schedule.name, **capture_state(trainer))
    for line in sys.stdin:
        if not line.strip():
            break
        say(seconds=run(int(line)))
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if CUDA else (0, 0)
    say(peak_allocated=peaks[0], peak_reserved=peaks[1], **capture_state(trainer))


if __name__ == "__main__":
    main()
