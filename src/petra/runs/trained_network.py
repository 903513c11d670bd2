"""The network of a run, built in the same way for training and for use, and the files that describe it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from petra import models
from petra.data import Data, ImageData, ImageFileData, SentenceData, TokenData
from petra.data.tokenizer import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, Tokenizer
from petra.models.imported import is_import_path
from petra.reversible import FixedPointCoupling, Network
from petra.runs.config import RunConfig
from petra.runs.file_hashes import read_bytes, read_json
from petra.runs.model_arguments import build_network, check_options, default_arguments, network_arguments
from petra.runs.run_folder import CONFIG, NETWORK, TOKENIZER, VOCABULARY, check_finished
from petra.runs.weight_files import check_hash, check_names, other_shapes, read_weights, weight_file
from petra.trainer.checkpoint import to_json_bytes
from petra.trainer.validation import check_device

TOKENS_REMEDY = "restore it, because it defines the tokens"
"""The remedy for a missing or damaged vocabulary or tokenizer."""


@dataclass(frozen=True)
class NetworkSpec:
    """The contents of `network.json`: how to build the network of a run and how to prepare its inputs."""

    model: str
    arguments: dict[str, Any]
    """All arguments of the network, with defaults, so that later changes of defaults do not affect it."""
    coupling: str | None = None
    mean: list[float] = field(default_factory=list)
    """The mean of each channel of images whose pixels are scaled to [0, 1]; inputs are normalised by it and `std`."""
    std: list[float] = field(default_factory=list)
    class_names: list[str] = field(default_factory=list)
    end_of_text: int | None = None
    """The token that separates documents, for tokens of a `tokenizer.json`."""

    @classmethod
    def of(cls, config: RunConfig, data: Data) -> NetworkSpec:
        """Return the specification of a run with this data."""
        arguments = network_arguments(config.model, data.arguments, config.model_options, data.name)
        return cls(
            model=config.model,
            arguments={**default_arguments(config.model), **arguments},
            coupling=config.coupling,
            mean=list(data.mean) if isinstance(data, ImageData | ImageFileData) else [],
            std=list(data.std) if isinstance(data, ImageData | ImageFileData) else [],
            class_names=class_names(data),
            end_of_text=data.info.end_of_text if isinstance(data, TokenData) else None,
        )

    @classmethod
    def read(cls, folder: Path) -> NetworkSpec:
        """Read `network.json` from the folder of a run; raise ValueError if it is missing or damaged."""
        file, remedy = folder / NETWORK, f"`petra train --resume --out {folder}` writes it again"
        values = read_json(folder, NETWORK, remedy)
        try:
            spec = cls(**values)
            if not isinstance(spec.model, str):
                raise TypeError("model is not a name")
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{file} is damaged ({error}): {remedy}") from error
        spec._find_model(file)
        try:
            check_options(spec.model, spec.arguments)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{file} is damaged ({error}): {remedy}") from error
        return spec

    def _find_model(self, file: Path) -> None:
        """Raise ValueError if the network is not known in this process."""
        try:
            models.find(self.model)
        except ValueError as error:
            if is_import_path(self.model):
                raise
            raise ValueError(
                f"{file} names the network {self.model!r}, which is not registered here ({error}). For one of your "
                "own, import the module that registers it before petra.load, or train with --model "
                "package.module:function"
            ) from error

    def network(self) -> Network:
        """Build the network with random weights."""
        network = build_network(self.model, self.arguments)
        return network.use_coupling(FixedPointCoupling) if self.coupling == "fixed-point" else network


def load(path: str | Path, device: torch.device | str = "cpu", weights: str = "last") -> Network:
    """Load the trained network of a finished run, in evaluation mode.

    Inputs are as in training: images are floats of shape (batch, channels, height, width), normalised by `mean` and
    `std` in the run's `network.json`; tokens are indices into its `vocabulary.json`, or those of its
    `tokenizer.json`.

    >>> network = petra.load("runs/digits")              # doctest: +SKIP
    >>> classes = network(images).argmax(-1)             # doctest: +SKIP

    Args:
        path: The folder that `petra train` has written.
        device: The device to put the network on.
        weights: `"last"`, those of the end; `"best"`, those of the best evaluation; or `"ema"`, the average at the end
            of a run with `--ema`.

    Returns:
        The network with the weights.

    Raises:
        ValueError: If the folder holds no finished run, or its files are damaged.
    """
    folder = Path(path).expanduser()
    check_finished(folder)
    check_device(torch.device(device))
    spec, file = NetworkSpec.read(folder), weight_file(folder, weights)
    found = read_weights(file)
    with torch.random.fork_rng(devices=[]):  # the random weights are replaced at once
        network = spec.network()
    check_names(network, found, file)
    for name in other_shapes(network, found):
        shape, wanted = list(found[name].shape), list(network.state_dict()[name].shape)
        raise ValueError(f"{name} has shape {shape} in {file}, not {wanted}: restore the files of one run")
    network.load_state_dict(found)
    check_hash(network.state_dict(), folder, file.name)
    return network.to(device).eval()


def read_vocabulary(folder: Path) -> tuple[str, ...]:
    """Return the text of each token of a run on text; empty if tokens are bytes or those of a `tokenizer.json`."""
    if token_kind(folder) in ("bytes", "tokens"):
        return ()
    entries = read_json(folder, VOCABULARY, TOKENS_REMEDY, list)
    if not all(isinstance(entry, str) for entry in entries):
        raise ValueError(f"{folder / VOCABULARY} is damaged (its entries are not strings): {TOKENS_REMEDY}")
    return tuple(entries)


def vocabulary_files(data: Data) -> dict[str, bytes]:
    """Return the names and contents of the files of a run that define its tokens; empty for bytes and images."""
    if isinstance(data, TokenData):
        return {TOKENIZER: (data.folder / TOKENIZER).read_bytes()}
    return {VOCABULARY: to_json_bytes(data.vocabulary)} if data.vocabulary else {}


def token_kind(folder: Path) -> str:
    """Return the kind of data that a run was trained on: `text`, `bytes`, `tokens`, or the name of other data."""
    return RunConfig.read(folder / CONFIG).data.partition(":")[0]


def read_tokenizer(folder: Path, where: str) -> Tokenizer:
    """Return the tokenizer of a run of a language model.

    Args:
        folder: The folder of the run.
        where: The name of texts in errors.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If its file is missing or damaged, or a package is missing.
    """
    kind = token_kind(folder)
    if kind == "bytes":
        return ByteTokenizer()
    if kind != "tokens":
        return CharacterTokenizer(read_vocabulary(folder), where)
    file, end = folder / TOKENIZER, NetworkSpec.read(folder).end_of_text
    read_bytes(folder, TOKENIZER, TOKENS_REMEDY)  # compares it with its hash
    return HuggingFaceTokenizer.read(file) if end is None else HuggingFaceTokenizer.read(file, end)


def class_names(data: Data) -> list[str]:
    """Return the names of the classes; empty if the data has none."""
    return list(data.class_names) if isinstance(data, ImageData | ImageFileData | SentenceData) else []
