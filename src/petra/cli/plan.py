"""`petra plan`: where to cut a network for so many ranks, what to expect of it, and what comes of it."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from petra.cli.case import Case
from petra.cli.options import add_model_options, cores, order_option, refuse_processes, whole_numbers
from petra.cli.trial import basic_method, spawn_ranks
from petra.measure import Plan, environment
from petra.methods import METHODS
from petra.tables import mebibytes, render
from petra.training import checkpoint
from petra.training.files import refuse_folder


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="find where to cut a network for several processes",
        description="Times every layer on all ranks at once, chooses the cut whose busiest rank has least to do, "
        "predicts tick, speed-up and memory of it, and holds the prediction against a short run on random data. "
        "Ranks are processes on this machine, on CPU cores. What corrections of staleness (--correct) take is not "
        "counted.",
        epilog="Example: petra plan --model revnet18 --ranks 4 --batch-size 64 --memory-limit 500",
    )
    add_network_options(parser, batch_size=64)
    how = parser.add_argument_group("how to train")
    how.add_argument("--ranks", type=int, required=True, metavar="N", help="processes")
    how.add_argument(
        "--stages", type=whole_numbers, metavar="N", help="their number (default: one a rank), or layers in each"
    )
    how.add_argument("--method", default="petra", metavar="NAME", help=f"one of {', '.join(METHODS)} (default petra)")
    how.add_argument(
        "--order",
        type=order_option,
        metavar="NAME",
        help="low-staleness, lock-step, locked-forward, or numbers in flight",
    )
    how.add_argument("--accumulate", type=int, default=1, metavar="K", help="micro-batches per update (default 1)")
    how.add_argument("--memory-limit", type=float, metavar="MiB", help="most that a rank may hold (default: no limit)")
    check = parser.add_argument_group("the check")
    check.add_argument("--ticks", type=int, default=20, metavar="N", help="micro-batches to time (default %(default)s)")
    check.add_argument("--no-run", action="store_true", help="predict only")
    check.add_argument("--json", type=Path, metavar="FILE", help="also write everything into a file")
    check.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(run=run)


def add_network_options(parser: argparse.ArgumentParser, batch_size: int) -> None:
    """The network, and the shape of what it is given."""
    what = parser.add_argument_group("what to train")
    what.add_argument("--model", metavar="NAME", required=True, help="network; `petra models` lists them")
    add_model_options(what)
    what.add_argument("--image", type=image_shape, metavar="CxHxW", help="default 3x32x32")
    what.add_argument("--classes", type=int, default=10, metavar="N", help="default %(default)s")
    what.add_argument("--length", type=int, metavar="N", help="tokens in a text (default 256)")
    what.add_argument("--vocab-size", type=int, metavar="N", help="of text (default 256)")
    samples = "samples in a micro-batch (default %(default)s)"
    what.add_argument("--batch-size", type=int, default=batch_size, metavar="N", help=samples)


def image_shape(text: str) -> tuple[int, int, int]:
    """``3x32x32``."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not channels, height and width like 3x32x32")
    channels, height, width = map(int, parts)
    return channels, height, width


def run(options: argparse.Namespace) -> None:
    """Plan on real processes, and print what came out."""
    refuse_processes("a plan starts its ranks itself")
    case = Case.of(options)
    if options.json is not None:
        refuse_folder("--json", options.json)
    if case.ranks > cores():
        print(
            f"petra plan: {case.ranks} ranks share {cores()} cores, so they wait for cores too: "
            "what is predicted here holds where there is a core a rank",
            file=sys.stderr,
        )
    with tempfile.TemporaryDirectory() as folder:
        spawn_ranks(case, Path(folder))
        found = json.loads(Path(folder, "found.json").read_text())
    if "error" in found:
        raise ValueError(found["error"])
    plan = Plan(**found["plan"])
    if options.json is not None:
        result = {"case": asdict(case), "speedup": plan.speedup, **found, "environment": environment()}
        checkpoint.write_json(options.json, result)
    print(report(case, plan, found["measured"]))


def report(case: Case, plan: Plan, measured: dict[str, Any] | None) -> str:
    """The table, the totals, and the options to train with."""
    header = ["rank", "layers", "ms per tick", "measured", "memory", "measured", "sent up", "sent down"]
    rows = []
    for rank, layers in enumerate(plan.layers):
        rows.append(
            [
                rank,
                _listed(layers),
                _ms(plan.seconds[rank]),
                _ms(measured["own"][rank]) if measured else "",
                mebibytes(plan.memory[rank]),
                mebibytes(measured["memory"][rank]) if measured else "",
                mebibytes(plan.sent_up[rank]),
                mebibytes(plan.sent_down[rank]),
            ]
        )
    if measured is None:
        rows = [[cell for i, cell in enumerate(row) if header[i] != "measured"] for row in rows]
        header = [name for name in header if name != "measured"]
    stages = ",".join(map(str, plan.stages))
    how = f"--method {case.method}" + (f" --accumulate {case.accumulate}" if case.accumulate > 1 else "")
    if case.order is not None:
        how += f" --order {case.order if isinstance(case.order, str) else ','.join(map(str, case.order))}"
    lines = [
        f"{case.model} with {case.method} on {case.ranks} ranks, {len(plan.stages)} stages of {stages} layers; "
        f"micro-batches of {case.batch_size}, threads a rank: {case.threads}",
        "",
        render(header, rows),
        "",
    ]
    where = "" if plan.in_a_row else f" --placement {','.join(map(str, plan.placement))}"
    name = basic_method(case.network()).name
    if measured is None:
        lines += [
            f"tick: predicted {_ms(plan.tick)} ms",
            f"times basic model parallelism ({name}): predicted {plan.speedup:.2f}",
        ]
    else:
        lines += [
            f"tick: predicted {_ms(plan.tick)} ms, measured {_ms(measured['tick'])} ms, "
            f"ratio {plan.tick / measured['tick']:.2f}",
            f"times basic model parallelism ({name}): predicted {plan.speedup:.2f}, "
            f"measured {measured['basic'] / measured['tick']:.2f}",
        ]
    return "\n".join(
        [
            *lines,
            "",
            f"to train with: {how} --ranks {case.ranks} --stages {stages if len(plan.stages) > 1 else 1}{where}",
        ]
    )


def _listed(layers: list[int]) -> str:
    """``0-2, 5`` for 0, 1, 2 and 5."""
    starts = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
