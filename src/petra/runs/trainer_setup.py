"""Builds the trainer of a run from its configuration, and warns about options that seldom make sense."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from petra.data import Data, ImageFileData
from petra.distributed import SingleProcess, Transport
from petra.formatting import counted
from petra.methods.petra import Petra
from petra.optim import hidden_matrices
from petra.reversible import Network, ReversibleLayer
from petra.reversible.storage import expand_storages
from petra.runs.config import RunConfig
from petra.runs.trained_network import NetworkSpec
from petra.runs.weight_files import init_weights
from petra.trainer.trainer import Trainer
from petra.trainer.validation import NotReversibleWarning


class RunTrainer(Trainer):
    """A trainer whose warnings are kept for the run to print, in one line each."""

    def _warn(self, text: str) -> None:
        self.__dict__.setdefault("_messages", []).append(_as_options(text))

    def take_messages(self) -> list[str]:
        """Return the warnings since the last call.

        Returns:
            One line for each.
        """
        found: list[str] = self.__dict__.pop("_messages", [])
        return found


@dataclass
class TrainerSetup:
    """Builds trainers of one run, which differ in their stages only."""

    config: RunConfig
    spec: NetworkSpec
    batches: int
    """Micro-batches in an epoch."""
    device: torch.device
    vocabulary_files: Mapping[str, bytes]
    """Names and contents of the files that define the tokens."""
    resumed: bool
    """The weights come from a checkpoint, and not from `init_from`."""
    weights_message: str | None = None
    """A message about the initial weights, once a trainer has been built."""

    def build(
        self,
        transport: Transport,
        stages: int | Sequence[int],
        schedule: str | Sequence[int] | None,
        placement: Sequence[int] | None = None,
        cuda_graph: bool | None = False,
        flush_until: int | None = None,
    ) -> RunTrainer:
        """Build a trainer.

        Args:
            transport: Connects it with other ranks.
            stages: The number of stages, or the layers of each.
            schedule: The schedule of a pipelined method.
            placement: The rank of each stage.
            cuda_graph: Whether to capture ticks; None decides by the device.
            flush_until: The number of first updates with exact gradients.

        Returns:
            The trainer.
        """
        config = self.config
        torch.manual_seed(config.seed)
        network = self.spec.network()
        if config.init_from is not None and not self.resumed:
            self.weights_message = init_weights(network, config.init_from, self.vocabulary_files)
        if config.channels_last:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if config.compile:
            network.compile_functions()
        if config.storage:
            network.use_storage(*expand_storages(config.storage))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotReversibleWarning)  # `config_warnings` says it
            return self._trainer(network, transport, stages, schedule, placement, cuda_graph, flush_until)

    def trainer_of(self, network: Network) -> RunTrainer:
        """Build another trainer of a network that `build` has made, in one process.

        Args:
            network: The network.

        Returns:
            The trainer.
        """
        stages, schedule = self.config.stages, self.config.schedule
        return self._trainer(network, SingleProcess(self.device), stages, schedule, None, False, None)

    def _trainer(
        self,
        network: Network,
        transport: Transport,
        stages: int | Sequence[int],
        schedule: str | Sequence[int] | None,
        placement: Sequence[int] | None,
        cuda_graph: bool | None,
        flush_until: int | None,
    ) -> RunTrainer:
        config = self.config
        return RunTrainer(
            network,
            loss=config.loss,
            optimizer=partial(config.make_optimizer, hidden=hidden_matrices(network)),
            method=config.method,
            stages=stages,
            scheduler=config.curve(self.batches).scheduler,
            accumulate=config.accumulate,
            schedule=schedule,
            flush_until=flush_until,
            clip_norm=config.clip_norm,
            clip=config.clip,
            ema=config.ema,
            free_gradients=True,
            autocast=config.autocast_dtype,
            seed=config.seed,
            device=self.device,
            transport=transport,
            placement=placement,
            comm_dtype=config.comm_dtype,
            corrections=config.corrections,
            cuda_graph=cuda_graph,
        )


def config_warnings(config: RunConfig, data: Data, trainer: RunTrainer, batches: int) -> Iterator[str]:
    """Yield one line for each option that is allowed, but seldom intended."""
    if isinstance(data, ImageFileData) and config.image_size is None:
        size = data.image_size
        yield f"images may differ in size, so they are resized to {size}×{size}: --image-size changes this"
    epochs = config.training_epochs(batches)
    if config.warmup_epochs is not None and 0 < epochs <= config.warmup_epochs:
        warmup = f"{counted(config.warmup_epochs, 'epoch')} of warm-up for {epochs:g} of training"
        yield f"{warmup}: the learning rate never reaches its full value (--warmup-epochs)"
    if isinstance(trainer.method, Petra) and not any(isinstance(layer, ReversibleLayer) for layer in trainer.network):
        yield (
            f"no layer of {config.model} is reversible, so {config.method} stores their inputs and computes them "
            "again: `petra models` lists reversible networks"
        )
    yield from trainer.take_messages()


def _as_options(text: str) -> str:
    """Replace the arguments of a trainer in a warning by the options of the command line."""
    for argument, option in _OPTIONS.items():
        text = text.replace(argument, option)
    return text


_OPTIONS = {
    "an optimizer with lr=": "--lr ",
    "corrections=['predict', 'inertia:4']": "--corrections predict,inertia:4",
    "schedule='1f1b'": "--schedule 1f1b",
    "accumulate=": "--accumulate ",
    "lr=": "--lr ",
    "Muon and": "--optimizer muon and",
}
