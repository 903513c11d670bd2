"""A whole run on random images of the size of CIFAR-10, including data loading, evaluation and checkpoints.

Prints a line of JSON: images per second in training (with data loading), and overall, with an evaluation and a
checkpoint after every epoch; the recipe has fewer checkpoints. The first epoch is warm-up, and in the last one the
pipeline drains, which happens once per training: neither counts.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from worker import capture_state

from petra.cli.options import add_run_options, given, set_up_device
from petra.runs.config import RunConfig
from petra.runs.run import Run


class TimedRun(Run):
    """A run that records the time before and after the end of each epoch."""

    def _end_epoch(self) -> None:
        self.clock = [*getattr(self, "clock", []), now()]
        super()._end_epoch()
        self.clock.append(now())


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_run_options(parser, with_method=True)
    options = parser.parse_args()
    device = set_up_device(options)
    config = RunConfig.from_options("petra-cifar10", {**given(options), "checkpoint_epochs": 1})
    if config.epochs < 3:
        parser.error(f"--epochs is {config.epochs}: give 3 or more, because the first and the last do not count")
    with tempfile.TemporaryDirectory() as folder:
        run = TimedRun(config, Path(folder) / "run", device=device, quiet=True, cuda_graph=options.cuda_graph)
        images = min(run.train.samples, len(run.train) * config.batch_size)  # without those that are dropped
        run()
    ends, starts = run.clock[0::2], run.clock[1::2]  # end of training in an epoch; start of the next epoch
    epochs = len(ends) - 2
    training = sum(end - start for start, end in zip(starts, ends[1:-1], strict=False))
    whole = starts[-2] - starts[0]
    found = {
        "epochs": epochs,
        "training_images_per_second": images * epochs / training,
        "whole_images_per_second": images * epochs / whole,
        **capture_state(run.trainer),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
