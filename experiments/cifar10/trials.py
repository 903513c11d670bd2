"""A training as a command line of petra, and a guess at what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

IMAGES_PER_SECOND = 28_000
"""What two captured trainings of a RevNet-18 came to together on an H200, about."""
MEASUREMENT_SECONDS = 0.2
"""A guess at what a comparison of gradients adds: ticks that a watched micro-batch has a part in are not replayed. Of
trainings that ran side by side, those with 29 comparisons took no longer than those without."""
COST = {"revnet18": 1.0, "resnet18": 1.0, "revnet34": 1.9, "resnet34": 1.9, "revnet50": 3.0, "resnet50": 3.0}
COST |= {"resnet164-basic": 2.1, "resnet101-cifar": 3.2}
"""What a sample costs, about, in units of RevNet-18. The last two are 3.8 seconds an epoch, worked out from
five trainings side by side, and 5.7, from 4.5 that a backprop's ticks take and a third more for other methods."""

SMOKE = {"data": "digits", "width": 4, "epochs": 2}
SMOKE_OF_RECIPE = {"warmup_epochs": 1, "batch_size": 512, "lr": 0.01}
SMOKE_WITHOUT = {"depths": "1,1"}  # those that have a recipe need the layers for their stages


@dataclass(frozen=True)
class Trial:
    """One training: a name, and options of `petra train` over those of a recipe, or all of them."""

    name: str
    options: dict[str, Any]
    seed: int = 0
    command: str = "train"
    recipe: str | None = "petra-cifar10"

    @property
    def group(self) -> str:
        """The name without the seed: runs of the same group are averaged."""
        return self.name.rpartition("-s")[0]

    @property
    def watched(self) -> bool:
        """Whether gradients are compared meanwhile."""
        return self.command == "fidelity"

    @property
    def seconds(self) -> float:
        """A guess at the GPU's time."""
        images = self.options["epochs"] * 50_000
        measurements = images / self.options["batch_size"] / self.options["every"] if self.watched else 0
        cost = COST[self.options["model"]]
        return float(cost * (images / IMAGES_PER_SECOND + measurements * MEASUREMENT_SECONDS))

    def arguments(self) -> list[str]:
        """For the command line of petra, without data, device and folder."""
        found = [self.command, *(["--recipe", self.recipe] if self.recipe else []), "--seed", str(self.seed)]
        for name, value in self.options.items():
            found += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return found

    def smoke(self) -> Trial:
        """The same, tiny, on digits."""
        options = {**self.options, **SMOKE, **(SMOKE_OF_RECIPE if self.recipe else SMOKE_WITHOUT)}
        return replace(self, options={**options, "every": 1} if self.watched else options)
