"""The configuration of `petra plan` and `petra memory`: a network, the shape of its inputs, and how to train it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from petra import methods
from petra.cli.device import cores
from petra.cli.options import model_options
from petra.data import text as text_data
from petra.optim import hidden_matrices
from petra.pipeline import partition
from petra.reversible import Network
from petra.runs.model_arguments import accepted, build_network, check_options, network_arguments
from petra.runs.option_fields import like, option
from petra.runs.run_options import MODEL, RunOptions
from petra.schedule import PipelineSchedule
from petra.trainer import optimizers
from petra.trainer.schedules import choose_schedule

DEFAULT_IMAGE = (3, 32, 32)
"""Default channels, height and width of an image."""
DEFAULT_VOCAB_SIZE = 256
"""Default vocabulary of text: that of bytes."""


def image_shape(text: str) -> tuple[int, int, int]:
    """Parse `3x32x32`."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError("give channels, height and width, like 3x32x32")
    channels, height, width = map(int, parts)
    return channels, height, width


@dataclass(kw_only=True)
class InputOptions:
    """The network, and the shape of its inputs and targets."""

    model: str = like(RunOptions, "model")
    image: tuple[int, int, int] | None = option(
        None,
        help="shape of an image",
        group=MODEL,
        metavar="CxHxW",
        parse=image_shape,
        default_text="x".join(map(str, DEFAULT_IMAGE)),
    )
    classes: int = option(10, help="number of classes", group=MODEL, metavar="N", minimum=1)
    seq_len: int | None = like(RunOptions, "seq_len", default_text=str(text_data.DEFAULT_SEQ_LEN))
    vocab_size: int | None = like(
        RunOptions, "vocab_size", help="vocabulary of text", default_text=str(DEFAULT_VOCAB_SIZE)
    )


LINKS = "links between ranks"


@dataclass(kw_only=True)
class LinkOptions:
    """The speed of links, as `petra doctor` measures it."""

    latency: float = option(
        0.0,
        help="ms that a message takes. With --latency or --bandwidth, the plan also chooses how many micro-batches are "
        "in flight in each stage, so that ranks do not wait for messages",
        group=LINKS,
        metavar="MS",
        minimum=0,
    )
    bandwidth: float | None = option(
        None,
        help="of a link in each direction",
        group=LINKS,
        metavar="GBIT/S",
        above=0,
        default_text="measured here; no limit in simulations",
    )


@dataclass(frozen=True)
class PlanConfig:
    """A network, its inputs and how to train it; every rank gets a copy."""

    model: str
    model_options: dict[str, Any]
    image: tuple[int, int, int] | None
    """Channels, height and width; None for text."""
    batch_size: int
    method: str
    schedule: str | list[int] | None
    accumulate: int
    optimizer: str
    optimizer_state: str
    ranks: int
    stages: int | list[int] | None
    memory_limit: int | None
    ticks: int
    measure: bool
    threads: int
    quiet: bool
    latency: float
    """Seconds that a message takes on its way, in addition to what is measured here."""
    bandwidth: float | None
    """Bytes per second of a link in each direction; None if it is measured here."""

    @property
    def has_links(self) -> bool:
        """True if the speed of links is given, for which the plan chooses numbers in flight."""
        return self.latency > 0 or self.bandwidth is not None

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> PlanConfig:
        """Read the command line; raise ValueError for the first option that cannot work."""
        takes, given = accepted(options.model), model_options(options)
        check_options(options.model, given)
        of_images = "in_channels" in takes
        for name in ("seq_len", "vocab_size") if of_images else ("image",):
            if getattr(options, name) is not None:
                kind = "images" if of_images else "text"
                raise ValueError(f"{options.model} takes {kind}: leave --{name.replace('_', '-')} out")
        image = (options.image or DEFAULT_IMAGE) if of_images else None
        data_arguments: dict[str, Any] = {
            "vocab_size": options.vocab_size or DEFAULT_VOCAB_SIZE,
            "seq_len": options.seq_len or text_data.DEFAULT_SEQ_LEN,
        }
        if image is not None:
            channels, height, width = image
            data_arguments = {"in_channels": channels, "image_size": height if height == width else (height, width)}
        if "num_classes" in takes:
            data_arguments["num_classes"] = options.classes
        config = cls(
            model=options.model,
            model_options=network_arguments(options.model, data_arguments, given, "--image"),
            image=image,
            batch_size=options.batch_size,
            method=options.method,
            schedule=options.schedule,
            accumulate=options.accumulate,
            optimizer=options.optimizer,
            optimizer_state=options.optimizer_state,
            ranks=options.ranks,
            stages=options.stages,
            memory_limit=None if options.memory_limit is None else int(options.memory_limit * 2**20),
            ticks=options.ticks,
            # A run here would not have these links.
            measure=not options.no_run and not options.latency and options.bandwidth is None,
            threads=max(1, cores() // options.ranks),
            quiet=options.quiet,
            latency=options.latency / 1e3,
            bandwidth=None if options.bandwidth is None else options.bandwidth * 1e9 / 8,
        )
        optimizers.check_state(config.optimizer, config.optimizer_state)
        with torch.device("meta"):
            layers = len(config.network())
        cuts = partition(layers, config.ranks if config.stages is None else config.stages)
        if len(cuts) < config.ranks:
            raise ValueError(f"--stages is {config.stages} for {config.ranks} ranks: give at least one stage per rank")
        config.make_schedule(len(cuts))
        return config

    def network(self) -> Network:
        """Return the network, with the same weights on every rank."""
        torch.manual_seed(0)
        return build_network(self.model, self.model_options)

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of a stage; its learning rate is too small to diverge on random data."""
        lr, decay = 1e-3 if self.optimizer == "sgd" else 1e-5, 1e-4
        match self.optimizer:
            case "adamw":
                return optimizers.adamw(parameters, lr=lr, weight_decay=decay, state=self.optimizer_state)
            case "nadamw":
                return optimizers.nadamw(parameters, lr=lr, weight_decay=decay)
            case "soap":
                return optimizers.soap(parameters, lr=lr, weight_decay=decay)
            case "muon":
                hidden = {p for p in parameters if p.shape in self._hidden_shapes}
                return optimizers.muon(parameters, hidden=hidden, lr=lr, weight_decay=decay)
        return optimizers.sgd(parameters, lr=lr, weight_decay=decay)

    @cached_property
    def _hidden_shapes(self) -> set[torch.Size]:
        """The shapes of the matrices that Muon orthogonalises: layers are measured in copies of the network."""
        with torch.device("meta"):
            return {matrix.shape for matrix in hidden_matrices(self.network())}

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of a micro-batch of random data."""
        generator = torch.Generator().manual_seed(0)
        arguments = self.model_options
        if self.image is None:
            shape: tuple[int, ...] = (self.batch_size, arguments["seq_len"])
            inputs = torch.randint(arguments["vocab_size"], shape, generator=generator)
        else:
            shape = (self.batch_size,)
            inputs = torch.randn(self.batch_size, *self.image, generator=generator)
        if "num_classes" not in arguments:
            return inputs, torch.randint(arguments["vocab_size"], shape, generator=generator)
        return inputs, torch.randint(arguments["num_classes"], shape[:1], generator=generator)

    def make_schedule(self, stages: int) -> PipelineSchedule:
        """Return the schedule for a number of stages."""
        return choose_schedule(methods.find(self.method), stages, self.accumulate, self.schedule)


def listed(layers: list[int]) -> str:
    """Return `0-2, 5` for 0, 1, 2 and 5."""
    starts = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
