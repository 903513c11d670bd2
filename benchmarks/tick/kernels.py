"""Where the time of a tick goes: the kernels of one method on one GPU, by the profiler's names.

    K=benchmarks/tick/kernels.py
    python $K --model revnet18 --batch-size 64 --method petra --cuda-graph --autocast bf16 --channels-last

Takes the options of worker.py. Kernels of concurrent stages overlap, so their times add up to more than the time of
the tick.
"""

import re
import sys
import time
from collections import defaultdict

import worker
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from petra.formatting import render

TICKS = 10
SHOWN = 40


# Parts of PyTorch's C++ names that do not say what a kernel does.
_NOISE = (
    r"^void ",
    r"at::native::",
    r"\(anonymous namespace\)::",
    r"::operator\(\)\(\) const",
    r"::?\{lambda\(\)#\d+\}",
)


def short(name: str) -> str:
    """Return the informative part of a kernel's name."""
    for noise in _NOISE:
        name = re.sub(noise, "", name)
    return name[:120]


def main() -> None:
    given = worker.options([*sys.argv[1:], "--device", "cuda"])
    trainer, data = worker.make(given), worker.batches(given)

    def run(ticks: int) -> float:
        worker.synchronize()
        began = time.perf_counter()
        for tick in range(ticks):
            trainer.step(*data[tick % len(data)])
        worker.synchronize()
        return (time.perf_counter() - began) / ticks

    run(worker.until_steady(trainer))
    seconds = run(5 * TICKS)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(TICKS)
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or []:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            spent[short(event.name)].append(event.time_range.elapsed_us())
    whole = sum(map(sum, spent.values()))
    rows = []
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        share = f"{sum(times) / whole:.3f}"
        rows.append([name, f"{len(times) / TICKS:.1f}", f"{sum(times) / TICKS:.1f}", share])
    print(render(["kernel", "per tick", "µs per tick", "share"], rows, left=1))
    print(f"{1e3 * seconds:.3f} ms per tick without the profiler; {whole / TICKS / 1e3:.3f} ms of kernels")


if __name__ == "__main__":
    main()
