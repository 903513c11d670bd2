"""`petra schedule`: draws a pipeline schedule as text or as an SVG picture."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petra import methods
from petra.cli.options import add_options
from petra.formatting import terminal_width
from petra.methods import METHODS
from petra.runs.option_fields import check_values, like, option, schedule_option
from petra.runs.run_options import RunOptions
from petra.schedule import (
    SCHEDULES,
    FlushEverySchedule,
    InterleavedSchedule,
    PipelineSchedule,
    ScheduleTable,
    check_schedule,
    draw,
    draw_svg,
    find_schedule,
)
from petra.trainer.schedules import choose_schedule

DEFAULT = "low-staleness"


@dataclass(kw_only=True)
class ScheduleOptions:
    """The options of `petra schedule`."""

    name: str | list[int] | None = option(
        None,
        help=f"{', '.join(SCHEDULES)}, or the number of micro-batches in flight of each stage, like 6,4,2,0",
        metavar="NAME",
        parse=schedule_option,
        positional=True,
        default_text=f"{DEFAULT}, or the schedule of --method",
        keywords={"nargs": "?"},
    )
    stages: int = option(4, help="number of stages", metavar="J", minimum=1)
    microbatches: int = option(6, help="number of micro-batches", metavar="M", minimum=1)
    accumulate: int = like(RunOptions, "accumulate", group=None)
    method: str | None = like(
        RunOptions, "method", default=None, help="a method with this schedule", group=None, default_text="any"
    )
    text: bool = option(False, help="print the actions instead, one line per tick", exclusive="output")
    svg: Path | None = option(
        None, help="write an SVG picture instead", metavar="FILE", default_text="none", exclusive="output"
    )


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "schedule",
        description="Draws what every stage does in every tick: F3 is the forward of micro-batch 3, B3 its backward, "
        "U an update (before the first B: with zero gradients), L3 a synthesizer that learns. Stages that act in the "
        "same column can work at the same time.",
        epilog="Example: petra schedule lock-step --stages 4 --microbatches 6 --svg lock-step.svg",
    )
    add_options(parser, ScheduleOptions)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Check the schedule and draw it."""
    check_values(ScheduleOptions, vars(options))
    schedule = _schedule(options)
    table = ScheduleTable.of(schedule, options.microbatches)
    staleness = [schedule.staleness(stage) for stage in range(schedule.stages)]
    flushed = isinstance(schedule, FlushEverySchedule | InterleavedSchedule)  # and filled again: it is not constant
    check_schedule(table, None if flushed else staleness)
    if options.svg is not None:
        counts = f"{schedule.stages} stages, {options.microbatches} micro-batches"
        updates = "" if schedule.accumulate == 1 else f", an update every {schedule.accumulate}"
        options.svg.write_text(draw_svg(table, f"{schedule.name}: {counts}{updates}"), encoding="utf-8")
        print(f"wrote {options.svg}")
    elif options.text:
        print(table)
    else:
        print(draw(table, width=terminal_width()))
        if schedule.exact:
            print(f"\n{schedule.name}: no weight changes between a forward and its backward")
        else:
            found = ", ".join(map(str, staleness))
            print(f"\n{schedule.name}: ticks between forward and backward, stage by stage: {found}")
    sys.stdout.flush()


def _schedule(options: argparse.Namespace) -> PipelineSchedule:
    """Return the schedule that the options name."""
    name = options.name
    if options.method is not None:
        return choose_schedule(methods.find(options.method), options.stages, options.accumulate, name)
    if name is None or isinstance(name, str):
        return find_schedule(name or DEFAULT, options.stages, options.accumulate)
    return choose_schedule(METHODS["petra"], options.stages, options.accumulate, name)
