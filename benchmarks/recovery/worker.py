"""`python -m worker` is `petra` in which every rank notes when it starts and when it completes a tick.

The last number of a line is the processor time of the rank so far, of all its threads. With PETRA_BLOCK=N, it takes
snapshots in every other block of N ticks.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from petra.cli.main import main as petra_main
from petra.distributed import Snapshots
from petra.runs.run import Run
from petra.schedule import Kind


def note(run: Run) -> None:
    """Write the process, the time and the micro-batch of every tick of a rank into a file."""
    rank = run.transport.position.rank
    with Path(os.environ["PETRA_TICKS"], f"{rank}.txt").open("a", buffering=1) as file:
        file.write(f"start {os.getpid()} {time.monotonic()} {run.progress.microbatches} {time.process_time()}\n")
    log = Path(os.environ["PETRA_TICKS"], f"{rank}.txt").open("a", buffering=1)  # noqa: SIM115 - open while it trains
    last = run.trainer.stages[-1].index

    def observe(tick: int, action: Any, stage: Any) -> None:
        if action.kind is Kind.BACKWARD and action.stage == last:
            log.write(f"tick {os.getpid()} {time.monotonic()} {tick} {time.process_time()}\n")

    run.trainer.executor.observers.append(observe)


def alternate(block: int) -> None:
    """Begin snapshots in every other block of ticks only."""
    after_tick = Snapshots.after_tick

    def sometimes(self: Snapshots, tick: int, state: Any) -> None:
        if self.pending is not None or tick // block % 2:
            after_tick(self, tick, state)

    Snapshots.after_tick = sometimes  # type: ignore[method-assign]


def main(arguments: Any = None) -> int:
    """Run the command."""
    if block := os.environ.get("PETRA_BLOCK"):
        alternate(int(block))
    Run.on_start.append(note)
    return petra_main(arguments, module="worker")


if __name__ == "__main__":
    sys.exit(main())
