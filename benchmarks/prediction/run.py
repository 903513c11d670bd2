"""How well weight prediction estimates the weights some updates later, in a training with backprop.

    python benchmarks/prediction/run.py --model revnet18 --width 8 --data digits --epochs 3
    python benchmarks/prediction/run.py --model revnet18 --data path/to/cifar10 --device cuda --epochs 3

Takes the options of `petra train`. Every few updates, each correction that changes the weights of the forward predicts
the weights of some updates later. Once these updates are done, the error is the squared distance from the prediction to
the weights, divided by that from the weights at the time of the prediction: below 1, a prediction is better than none.
"best" is the multiple of lr·v that would have been nearest, found afterwards: the limit of such a prediction. Prints a
table and writes a file into the folder results.
"""

import argparse
import json
import re
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

from petra.cli.options import add_run_options, given, set_up_device
from petra.corrections import StageContext, find
from petra.formatting import render
from petra.measure import environment
from petra.runs.config import RunConfig
from petra.runs.run import Run
from petra.schedule import Kind


class Guesses:
    """An observer of the only stage of a training: predicts after every `every`-th update and computes the errors."""

    def __init__(self, stage, names, delays, every):
        self.corrections = {name: find(name) for name in names}
        self.delays, self.every = delays, every
        self.context = StageContext(stage.parameters, stage.optimizer, max(delays))
        self.open = []  # predicted update, delay, weights now, predictions by name, lr·v
        self.errors = defaultdict(list)  # by name and delay
        self.best = defaultdict(list)  # by delay

    @torch.no_grad()
    def __call__(self, tick, action, stage):
        if action.kind is not Kind.UPDATE:
            return
        self.context.updates += 1
        weights = flat(stage.parameters)
        for due in [guess for guess in self.open if guess[0] == self.context.updates]:
            self.open.remove(due)
            self.look_back(weights, *due[1:])
        if self.context.updates % self.every == 0:
            one = flat(find("predict").forward_weights(self.context, 1))
            for delay in self.delays:
                found = {name: flat(c.forward_weights(self.context, delay)) for name, c in self.corrections.items()}
                self.open.append((self.context.updates + delay, delay, weights, found, weights - one))

    def look_back(self, weights, delay, before, found, step):
        moved = before - weights
        least = self.best[delay]
        least.append(float(moved @ step / (step @ step)))
        guesses = {**found, "best": before - least[-1] * step}
        for name, guess in guesses.items():
            self.errors[name, delay].append(float((weights - guess).square().sum() / moved.square().sum()))


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors]).double()


def report(guesses, delays):
    names = [*guesses.corrections, "best"]
    errors = {name: {d: statistics.fmean(guesses.errors[name, d]) for d in delays} for name in names}
    steps = {d: statistics.fmean(guesses.best[d]) for d in delays}
    rows = [[name, *(f"{errors[name][d]:.2f}" for d in delays)] for name in names]
    rows.append(["steps of best", *(f"{steps[d]:.2f}" for d in delays)])
    print(render(["error of", *(f"{d} later" for d in delays)], rows))
    return {"errors": errors, "steps_of_best": steps, "guesses": len(guesses.best[delays[0]])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser, with_method=False)
    parser.add_argument("--guesses", nargs="+", metavar="CORRECTION", default=["predict", "coast", "coast:0.8"])
    parser.add_argument("--delays", nargs="+", type=int, default=[1, 4, 9, 18])
    parser.add_argument("--every", type=int, default=10, metavar="UPDATES", help="between predictions (default 10)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = RunConfig.from_options(options.recipe, {**given(options), "method": "backprop", "stages": 1})
            device = set_up_device(options)
            run = Run(config, Path(folder) / "run", device=device, quiet=options.quiet, cuda_graph=False)
            guesses = Guesses(run.trainer.stages[0], options.guesses, options.delays, options.every)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        run.trainer.executor.observers.append(guesses)
        summary = run()
    if not all(guesses.best[delay] for delay in options.delays):
        parser.error(
            f"there were fewer updates than a prediction with delay {max(options.delays)} needs: give more --epochs"
        )
    result = report(guesses, options.delays)
    result |= {"config": {**config.to_json(), "data": Path(config.data).name}, "environment": environment(device)}
    result["test_accuracy"] = summary["test_accuracy"]
    options.out.mkdir(exist_ok=True)
    name = re.sub(r"[^\w.-]", "-", f"{config.model}-{result['config']['data']}-{device.type}")
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
