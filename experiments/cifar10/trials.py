"""A training as a Petra command line, with an estimate of its cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

IMAGES_PER_SECOND = 28_000
"""Approximate throughput of two concurrent, captured trainings of RevNet-18 on an H200, together."""
MEASUREMENT_SECONDS = 0.2
"""Estimated cost of one comparison of gradients: ticks in which a measured micro-batch takes part are not captured. Of
trainings that ran concurrently, those with 29 comparisons took no longer than those without."""
COST = {"revnet18": 1.0, "resnet18": 1.0, "revnet34": 1.9, "resnet34": 1.9, "revnet50": 3.0, "resnet50": 3.0}
COST |= {"resnet164-basic": 2.1, "resnet101-cifar": 3.2}
"""Approximate cost of a sample relative to RevNet-18. The last two correspond to 3.8 seconds per epoch, computed from
five concurrent trainings, and 5.7, from 4.5 for the ticks of backprop and a third more for other methods."""

SMOKE = {"data": "digits", "width": 4, "epochs": 2}
SMOKE_OF_RECIPE = {"warmup_epochs": 1, "batch_size": 512, "lr": 0.01}
SMOKE_WITHOUT_RECIPE = {"depths": "1,1"}  # those with a recipe need the layers for their stages


@dataclass(frozen=True)
class Trial:
    """One training: its name and its options of `petra train`, on top of those of a recipe if it has one."""

    name: str
    options: dict[str, Any]
    seed: int = 0
    command: str = "train"
    recipe: str | None = "petra-cifar10"

    @property
    def group(self) -> str:
        """The name without the seed; trainings of the same group are averaged."""
        return self.name.rpartition("-s")[0]

    @property
    def watched(self) -> bool:
        """True if gradients are compared during training."""
        return self.command == "fidelity"

    @property
    def seconds(self) -> float:
        """Estimated GPU time."""
        images = self.options["epochs"] * 50_000
        measurements = images / self.options["batch_size"] / self.options["every"] if self.watched else 0
        cost = COST[self.options["model"]]
        return float(cost * (images / IMAGES_PER_SECOND + measurements * MEASUREMENT_SECONDS))

    def arguments(self) -> list[str]:
        """Return the arguments of the Petra command line, without data, device and folder."""
        found = [self.command, *(["--recipe", self.recipe] if self.recipe else []), "--seed", str(self.seed)]
        for name, value in self.options.items():
            found += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return found

    def smoke(self) -> Trial:
        """Return a tiny version of this training on digits."""
        options = {**self.options, **SMOKE, **(SMOKE_OF_RECIPE if self.recipe else SMOKE_WITHOUT_RECIPE)}
        return replace(self, options={**options, "every": 1} if self.watched else options)
