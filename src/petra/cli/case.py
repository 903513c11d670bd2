"""What `petra plan` and `petra memory` are asked for: a network, its data by shape alone, and how to train it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra import methods, models
from petra.cli.options import cores, model_options
from petra.execution import partition
from petra.reversible import Network
from petra.schedule import Order
from petra.training.fitting import accepted, check_options, network_arguments
from petra.training.orders import choose_order


@dataclass(frozen=True)
class Case:
    """What is planned or counted, as every rank is told it."""

    model: str
    model_options: dict[str, Any]
    image: tuple[int, int, int] | None
    """Channels, height and width; None for text."""
    batch_size: int
    method: str
    order: str | list[int] | None
    accumulate: int
    ranks: int
    stages: int | list[int] | None
    memory_limit: int | None
    ticks: int
    measure: bool
    threads: int
    quiet: bool

    @classmethod
    def of(cls, options: argparse.Namespace) -> Case:
        """From the command line; raises ValueError for the first thing that cannot work."""
        for name in ("ranks", "batch_size", "accumulate", "classes", "length", "vocab_size", "ticks"):
            if (value := getattr(options, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}: give 1 or more")
        if options.memory_limit is not None and not 0 < options.memory_limit < 1e12:
            raise ValueError(f"--memory-limit is {options.memory_limit}: give MiB of memory, or leave it out")
        takes, given = accepted(options.model), model_options(options)
        check_options(options.model, given)
        of_images = "in_channels" in takes
        for name in ("length", "vocab_size") if of_images else ("image",):
            if getattr(options, name) is not None:
                kind = "images" if of_images else "text"
                raise ValueError(f"{options.model} takes {kind}: leave --{name.replace('_', '-')} out")
        image = (options.image or (3, 32, 32)) if of_images else None
        told: dict[str, Any] = {"vocab_size": options.vocab_size or 256, "length": options.length or 256}
        if image is not None:
            channels, height, width = image
            told = {"in_channels": channels, "image_size": height if height == width else (height, width)}
        if "num_classes" in takes:
            told["num_classes"] = options.classes
        case = cls(
            model=options.model,
            model_options=network_arguments(options.model, told, given, "--image"),
            image=image,
            batch_size=options.batch_size,
            method=options.method,
            order=options.order,
            accumulate=options.accumulate,
            ranks=options.ranks,
            stages=options.stages,
            memory_limit=None if options.memory_limit is None else int(options.memory_limit * 2**20),
            ticks=options.ticks,
            measure=not options.no_run,
            threads=max(1, cores() // options.ranks),
            quiet=options.quiet,
        )
        with torch.device("meta"):
            layers = len(case.network())
        cuts = partition(layers, case.ranks if case.stages is None else case.stages)
        if len(cuts) < case.ranks:
            raise ValueError(f"--stages is {case.stages} for {case.ranks} ranks: give one stage a rank or more")
        case.make_order(len(cuts))
        return case

    def network(self) -> Network:
        """The network, with the same weights on every rank."""
        torch.manual_seed(0)
        return models.create(self.model, **self.model_options)

    def batch(self) -> tuple[Tensor, Tensor]:
        """One micro-batch of random data."""
        generator = torch.Generator().manual_seed(0)
        asked = self.model_options
        if self.image is None:
            shape: tuple[int, ...] = (self.batch_size, asked["length"])
            inputs = torch.randint(asked["vocab_size"], shape, generator=generator)
        else:
            shape = (self.batch_size,)
            inputs = torch.randn(self.batch_size, *self.image, generator=generator)
        if "num_classes" not in asked:
            return inputs, torch.randint(asked["vocab_size"], shape, generator=generator)
        return inputs, torch.randint(asked["num_classes"], shape[:1], generator=generator)

    def make_order(self, stages: int) -> Order:
        """The order for a number of stages."""
        return choose_order(methods.find(self.method), stages, self.accumulate, self.order)
