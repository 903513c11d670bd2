"""`petra memory`: activations of several methods against the number of modules, counted without computing anything."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from petra import methods
from petra.cli.case import Case
from petra.cli.options import order_option, refuse_unused, whole_numbers
from petra.cli.plan import add_network_options
from petra.measure import Activations, environment
from petra.measure.memory_figure import draw_memory
from petra.tables import mebibytes, render
from petra.training import Trainer, checkpoint
from petra.training.files import refuse_file
from petra.training.loss import cross_entropy


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "memory",
        help="count activations for several numbers of stages",
        description="Counts the activations that each method has alive at its peak, summed over the stages as if each "
        "had a device, for several numbers of stages and one micro-batch to an update. It is done on paper: nothing is "
        "computed, and no such memory is needed. Attention counts with its T×T probabilities, which fused kernels do "
        "not keep. Writes memory.json and memory.png into --out.",
        epilog="Example: petra memory --model resnet101-cifar --methods backprop features-replay ddg dni",
    )
    add_network_options(parser, batch_size=128)
    how = parser.add_argument_group("how to train")
    how.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        default=["backprop", "features-replay", "ddg", "dni"],
        help="default: backprop features-replay ddg dni; the first is what others are compared with",
    )
    how.add_argument(
        "--stages", type=whole_numbers, metavar="N,N,…", default=[1, 2, 3, 4], help="numbers of them (default 1,2,3,4)"
    )
    how.add_argument("--order", type=order_option, metavar="NAME", help="of pipelined methods, as in petra train")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=Path("runs/memory"), help="default %(default)s")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Count, print the table, write and draw it."""
    refuse_file(options.out)
    names = list(dict.fromkeys(name for text in options.methods for name in text.split(",")))
    refuse_unused(options, names)
    numbers = options.stages if isinstance(options.stages, list) else [options.stages]
    cases = {name: {k: _case(options, name, k) for k in sorted(set(numbers))} for name in names}
    rows: dict[str, dict[int, list[int]]] = {}
    for name, own in cases.items():
        for k, case in own.items():
            if not options.quiet:
                print(f"petra memory: {name}, K = {k} …", file=sys.stderr)
            rows.setdefault(name, {})[k] = count(case)
    sums = {name: {k: sum(found) for k, found in own.items()} for name, own in rows.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    one = next(iter(cases[names[0]].values()))
    what = {name: getattr(one, name) for name in ("model", "model_options", "image", "batch_size")}
    what["order"] = options.order
    found = {"bytes_of_stages": rows, "environment": environment()}
    checkpoint.write_json(options.out / "memory.json", {**what, **found})
    print(table(sums))
    drawn = draw_memory(sums, options.out / "memory.png", f"{options.model}, batch {options.batch_size}")
    print(f"activations of all stages; in {options.out}{'' if drawn else '; no figure: pip install matplotlib'}")


def _case(options: argparse.Namespace, method: str, stages: int) -> Case:
    order = options.order if methods.find(method).pipelined else None
    others = {"ranks": 1, "accumulate": 1, "memory_limit": None, "ticks": 1, "no_run": True}
    return Case.of(
        argparse.Namespace(**{**vars(options), **others, "method": method, "order": order, "stages": stages})
    )


def count(case: Case) -> list[int]:
    """Bytes of activations of every stage at their peak, in a tick with all histories full."""
    with torch.device("meta"):
        network = case.network()
    inputs, targets = (x.to("meta") for x in case.batch())
    trainer = Trainer(
        network,
        loss=cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
        method=case.method,
        stages=case.stages or 1,
        order=case.order,
    )
    for _ in range(trainer.order.staleness(0) + 1):
        trainer.step(inputs, targets)
    with Activations(trainer.executor) as found:
        trainer.step(inputs, targets)
    return [found.stages[stage.index] for stage in trainer.stages]


def table(sums: dict[str, dict[int, int]]) -> str:
    """A row a method: bytes for each number of stages, and how many times the first method's they are."""
    first, basic = next(iter(sums.items()))
    header = ["method", *(f"K = {k}" for k in basic), *(f"of {first}, {k}" for k in basic)]
    return render(
        header,
        [
            [name, *map(mebibytes, own.values()), *(f"{own[k] / basic[k]:.2f}" for k in basic)]
            for name, own in sums.items()
        ],
    )
