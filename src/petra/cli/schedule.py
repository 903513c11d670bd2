"""`petra schedule`: draws who does what when."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from petra import methods
from petra.cli.options import order_option
from petra.methods import METHODS
from petra.schedule import Schedule, check, draw
from petra.training.orders import choose_order


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "schedule",
        help="draw a schedule",
        description="Draws what every stage does in every tick: F3 is the forward of micro-batch 3, B3 its backward, "
        "U an update (before the first B: with zero), L3 a synthesizer that learns. Columns are moments in which the "
        "stages shown at work can work at the same time.",
        epilog="Example: petra schedule --stages 4 --microbatches 6 --order lock-step",
    )
    parser.add_argument("--stages", type=int, default=4, help="default %(default)s")
    parser.add_argument("--microbatches", type=int, default=6, help="default %(default)s")
    parser.add_argument("--accumulate", type=int, default=1, metavar="K", help="micro-batches per update (default 1)")
    parser.add_argument("--method", default="petra", metavar="NAME", help=f"one of {', '.join(METHODS)}")
    parser.add_argument(
        "--order", type=order_option, help="low-staleness, lock-step, locked-forward, or numbers in flight like 6,4,2,0"
    )
    parser.add_argument("--text", action="store_true", help="print actions instead, a line a tick")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Draw it, once it has been checked."""
    if options.microbatches < 1:
        raise ValueError(f"--microbatches is {options.microbatches}: give 1 or more")
    order = choose_order(methods.find(options.method), options.stages, options.accumulate, options.order)
    schedule = Schedule.of(order, options.microbatches)
    check(schedule, [order.staleness(stage) for stage in range(order.stages)])
    if options.text:
        print(schedule)
        return
    print(draw(schedule))
    staleness = ", ".join(str(order.staleness(stage)) for stage in range(order.stages))
    print(f"\n{order.name}: ticks between forward and backward, stage by stage: {staleness}")
    sys.stdout.flush()
