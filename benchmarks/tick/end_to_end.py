"""A whole run on random images of the size of CIFAR-10: data, evaluation and checkpoints included.

Prints a line of JSON: images per second while it trains (data included), and over everything, with an evaluation and a
checkpoint after every epoch, of which the recipe has fewer. The first epoch is warm-up, and in the last one the
pipeline is emptied, which a training does once: neither counts.
"""

import argparse
import json
import tempfile
import time
from inspect import signature
from pathlib import Path

import torch

from petra.cli.options import add_run_options, given, set_up_device
from petra.training.config import RunConfig
from petra.training.run import Run


class TimedRun(Run):
    """A run that looks at the clock before and after the end of each epoch."""

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
        parser.error(f"--epochs is {config.epochs}: give 3 or more, for the first and the last do not count")
    how = ("capture", "channels_last", "benchmark")  # which are the run's business, or the configuration's
    extra = {name: getattr(options, name) for name in how if name in signature(Run).parameters}
    with tempfile.TemporaryDirectory() as folder:
        run = TimedRun(config, Path(folder) / "run", device=device, quiet=True, **extra)
        images = min(run.train.samples, len(run.train) * config.batch_size)  # without those that are left out
        run()
    ends, starts = run.clock[0::2], run.clock[1::2]  # of training in an epoch; of the next epoch
    epochs = len(ends) - 2
    training = sum(end - start for start, end in zip(starts, ends[1:-1], strict=False))
    whole = starts[-2] - starts[0]
    found = {
        "epochs": epochs,
        "training_images_per_second": images * epochs / training,
        "whole_images_per_second": images * epochs / whole,
        "replayed": getattr(run.trainer.executor, "replayed", 0),
        "refusal": getattr(run.trainer.executor, "refusal", None),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
