"""The network of a run, built alike when it is trained and when it is used, and what the run's folder says about it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from petra import models
from petra.reversible import FixedPoint, Network
from petra.training.config import RunConfig
from petra.training.data import Data, ImageData, SentenceData
from petra.training.files import CONFIG, NETWORK, VOCABULARY, WEIGHTS, refuse_unfinished
from petra.training.fitting import check_options, network_arguments, usual_arguments
from petra.training.preparation import check_device
from petra.training.weights import check_names, other_shapes, read_weights, refuse_changed


@dataclass(frozen=True)
class Blueprint:
    """What it takes to build the network of a run and to read inputs as it does: the run's ``network.json``.

    ``arguments`` are all that the network was made with, defaults too: it stays the same, whatever becomes of these.
    """

    model: str
    arguments: dict[str, Any]
    exact: bool = False
    mean: list[float] = field(default_factory=list)
    """Of each channel of images whose pixels are scaled to [0, 1], with ``std`` what they are normalised by."""
    std: list[float] = field(default_factory=list)
    class_names: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, config: RunConfig, data: Data) -> Blueprint:
        """Of a run with this data."""
        told = network_arguments(config.model, data.arguments, config.model_options, data.name)
        return cls(
            model=config.model,
            arguments={**usual_arguments(config.model), **told},
            exact=config.exact,
            mean=list(data.mean) if isinstance(data, ImageData) else [],
            std=list(data.std) if isinstance(data, ImageData) else [],
            class_names=class_names(data),
        )

    @classmethod
    def read(cls, folder: Path) -> Blueprint:
        """From the folder of a run."""
        file, mend = folder / NETWORK, f"`petra train --resume --out {folder}` writes it anew"
        if not file.exists():
            raise ValueError(f"{file} is not there, for the run is of an earlier version: {mend}")
        try:
            found = cls(**json.loads(file.read_text()))
            check_options(found.model, found.arguments)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{file} is damaged ({error}): {mend}") from error
        return found

    def network(self) -> Network:
        """With weights that are drawn."""
        network = models.create(self.model, **self.arguments)
        return network.use_coupling(FixedPoint) if self.exact else network


def load(path: str | Path, device: torch.device | str = "cpu") -> Network:
    """The trained network of a run: ``path`` is the folder that `petra train` has written.

    It is in evaluation mode and has the weights that the run has ended with. Inputs are as in training: images as
    floats of shape (batch, channels, height, width), normalised by ``mean`` and ``std`` of the run's ``network.json``;
    tokens as numbers of entries of its ``vocabulary.json``.

    >>> network = petra.load("runs/digits")              # doctest: +SKIP
    >>> classes = network(images).argmax(-1)             # doctest: +SKIP
    """
    folder = Path(path).expanduser()
    refuse_unfinished(folder)
    check_device(torch.device(device))
    blueprint, weights = Blueprint.read(folder), read_weights(folder / WEIGHTS)
    with torch.random.fork_rng(devices=[]):  # what is drawn is replaced at once, and is nobody's business
        network = blueprint.network()
    check_names(network, weights, folder / WEIGHTS)
    for name in other_shapes(network, weights):
        found, wanted = list(weights[name].shape), list(network.state_dict()[name].shape)
        raise ValueError(f"{name} has shape {found} in {folder / WEIGHTS}, not {wanted}: are all files of one run?")
    network.load_state_dict(weights)
    refuse_changed(network.state_dict(), folder)
    return network.to(device).eval()


def read_vocabulary(folder: Path) -> tuple[str, ...]:
    """The text of each token of a run on text; empty where tokens are bytes."""
    if RunConfig.read(folder / CONFIG).data.partition(":")[0] == "bytes":
        return ()
    file = folder / VOCABULARY
    try:
        found = tuple(json.loads(file.read_text()))
        if not all(isinstance(entry, str) for entry in found):
            raise TypeError("its entries are no texts")
        return found
    except FileNotFoundError:
        raise ValueError(f"{file} is not there: put it back, for without it tokens mean nothing") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}): put back a copy") from error


def class_names(data: Data) -> list[str]:
    """What the classes are called; empty where the data does not tell."""
    return list(data.class_names) if isinstance(data, ImageData | SentenceData) else []
