"""Evaluates the network of a finished run on the test part of its data, or of other data of the same kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from petra.data import Data, ImageData, ImageFileData, TokenData, bits_per_byte, close_batches
from petra.runs.config import RunConfig
from petra.runs.file_hashes import read_bytes
from petra.runs.model_arguments import check_fits
from petra.runs.run_folder import CONFIG, TOKENIZER
from petra.runs.trained_network import (
    TOKENS_REMEDY,
    NetworkSpec,
    class_names,
    load,
    read_vocabulary,
    token_kind,
    vocabulary_files,
)
from petra.trainer.evaluation import evaluate_network
from petra.trainer.loss import cross_entropy


@dataclass(frozen=True)
class Score:
    """The test loss and accuracy of a network."""

    model: str
    data: str
    test_accuracy: float
    test_loss: float
    samples: int
    unit: str
    bits_per_byte: float | None
    """The test loss of a running text in bits per byte."""


def evaluate_run(
    folder: Path,
    *,
    data: str | None = None,
    device: torch.device | str = "cpu",
    batch_size: int | None = None,
    autocast: str | None = None,
    weights: str = "last",
) -> Score:
    """Evaluate the network of a run; options that are not given are those of the run.

    Args:
        folder: The folder of the run.
        data: Other data, as for `petra train`.
        device: The device to compute on.
        batch_size: The number of samples in a batch.
        autocast: The precision of residual functions: `"bf16"` or `"float32"`.
        weights: `"last"`, `"best"` or `"ema"`.

    Returns:
        The loss and the accuracy.

    Raises:
        ValueError: If the run has not finished, its files are damaged, or the data is of another kind.
    """
    network, spec, config = load(folder, device, weights), NetworkSpec.read(folder), RunConfig.read(folder / CONFIG)
    if data is not None:
        config = replace(config, data=data)
    if autocast is not None:
        config = replace(config, autocast=None if autocast == "float32" else autocast)
    test_data = _load_test_data(config, spec, folder)
    if config.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    size = config.evaluation_batch_size(test_data) if batch_size is None else batch_size
    batches = config.make_batches(test_data, "test", size, device=device)
    result = evaluate_network(
        network,
        batches.epoch(0),
        cross_entropy,
        stages=config.stages,  # they matter if messages between them are rounded
        autocast=config.autocast_dtype,
        comm_dtype=config.comm_dtype,
        device=device,
    )
    close_batches(batches)
    return Score(
        model=config.model,
        data=config.data,
        test_accuracy=result.accuracy or 0.0,
        test_loss=result.loss,
        samples=result.samples,
        unit=test_data.unit,
        bits_per_byte=bits_per_byte(test_data, result.loss),
    )


def _load_test_data(config: RunConfig, spec: NetworkSpec, folder: Path) -> Data:
    """Load the data with the vocabulary and the normalisation of the run."""
    data = config.load_data(test_only=True)
    check_fits(spec.model, spec.arguments, data.arguments, data.name)
    names = class_names(data)
    if names and spec.class_names and names != spec.class_names:
        strange = sorted(set(names) ^ set(spec.class_names)) or names
        raise ValueError(
            f"the classes of {data.name} are not those of the run (see {strange[0]!r}): give data with the same classes"
        )
    if isinstance(data, ImageData | ImageFileData):
        return replace(data, mean=tuple(spec.mean), std=tuple(spec.std))
    if isinstance(data, TokenData) or token_kind(folder) == "tokens":
        return _check_tokenizer(data, config.data, folder)
    vocabulary = read_vocabulary(folder)
    if data.vocabulary != vocabulary:
        data = config.load_data(vocabulary, test_only=True)
    if data.vocabulary != vocabulary:
        kinds = ("characters", "bytes") if vocabulary else ("bytes", "characters")
        raise ValueError(f"the network reads {kinds[0]}, but {config.data} is {kinds[1]}: give data as in the run")
    return data


def _check_tokenizer(data: Data, spec: str, folder: Path) -> Data:
    """Raise ValueError unless the data and the run have the same `tokenizer.json`."""
    own = folder / TOKENIZER
    if token_kind(folder) != "tokens":
        raise ValueError(
            f"the network does not read tokens of a tokenizer.json, as {spec} has: give data as in the run"
        )
    if vocabulary_files(data) != {TOKENIZER: read_bytes(folder, TOKENIZER, TOKENS_REMEDY)}:
        raise ValueError(
            f"{spec} was not encoded with the tokenizer of the run: give tokens of `petra tokenize --tokenizer {own}`"
        )
    return data
