"""The trained network of a run on the test part of its data, or of other data of the same kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from petra.training.config import RunConfig
from petra.training.data import Batches, Data, ImageData
from petra.training.files import CONFIG
from petra.training.fitting import check_fits
from petra.training.loss import cross_entropy
from petra.training.trained import Blueprint, class_names, load, read_vocabulary
from petra.training.trainer import Trainer


@dataclass(frozen=True)
class Score:
    """What a network has come to on the test part of some data."""

    model: str
    data: str
    test_accuracy: float
    test_loss: float
    samples: int
    unit: str


def evaluate_run(
    folder: Path,
    *,
    data: str | None = None,
    device: torch.device | str = "cpu",
    batch_size: int | None = None,
    autocast: str | None = None,
) -> Score:
    """Loss and accuracy as the run itself finds them: what is not given is as it was in training.

    ``autocast`` is ``"bf16"`` or ``"float32"``.
    """
    network, blueprint, config = load(folder, device), Blueprint.read(folder), RunConfig.read(folder / CONFIG)
    if data is not None:
        config = replace(config, data=data)
    if autocast is not None:
        config = replace(config, autocast=None if autocast == "float32" else autocast)
    found = _read_as(config, blueprint, folder)
    if config.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # Stages matter where messages are rounded; the optimizers are made and never used.
    trainer = Trainer(
        network,
        loss=cross_entropy,
        optimizer=config.make_optimizer,
        method="backprop",
        stages=config.stages,
        autocast=config.autocast_dtype,
        message_dtype=config.message_dtype,
        device=device,
        capture=False,
    )
    at_once = config.evaluated_at_once(found) if batch_size is None else batch_size
    batches = Batches(found, "test", at_once, device=device, channels_last=config.channels_last)
    result = trainer.evaluate(batches.epoch(0))
    return Score(config.model, config.data, result.accuracy or 0.0, result.loss, result.samples, found.unit)


def _read_as(config: RunConfig, blueprint: Blueprint, folder: Path) -> Data:
    """The data with the vocabulary and the normalisation of the run."""
    data = config.load_data(test_only=True)
    check_fits(blueprint.model, blueprint.arguments, data.arguments, data.name)
    names = class_names(data)
    if names and blueprint.class_names and names != blueprint.class_names:
        strange = sorted(set(names) ^ set(blueprint.class_names)) or names
        raise ValueError(
            f"the classes of {data.name} are not those of the run (see {strange[0]!r}): give data with them"
        )
    if isinstance(data, ImageData):
        return replace(data, mean=tuple(blueprint.mean), std=tuple(blueprint.std))
    vocabulary = read_vocabulary(folder)
    if data.vocabulary != vocabulary:
        data = config.load_data(vocabulary, test_only=True)
    if data.vocabulary != vocabulary:
        kinds = ("characters", "bytes") if vocabulary else ("bytes", "characters")
        raise ValueError(f"the network reads {kinds[0]}, and {config.data} is {kinds[1]}: give it as the run was")
    return data
