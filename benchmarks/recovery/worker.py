"""`python -m worker` is `petra` in which every rank notes when it starts and when it completes a tick.

The last number of a line is the processor time of the rank so far, of all its threads.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from petra.cli.main import main as petra_main
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


def main(arguments: Any = None) -> int:
    """Run the command."""
    Run.on_start.append(note)
    return petra_main(arguments, module="worker")


if __name__ == "__main__":
    sys.exit(main())
