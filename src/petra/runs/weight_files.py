"""Weights in safetensors files: read, checked, and used to initialise a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from petra.formatting import first_line, suggestion
from petra.runs.file_hashes import read_bytes
from petra.runs.run_folder import SUMMARY, TOKENIZER, VOCABULARY, WEIGHTS, check_finished
from petra.runs.summary import read_summary
from petra.trainer.best_weights import AVERAGE, BEST
from petra.trainer.state import weights_hash

WEIGHT_FILES = {"last": WEIGHTS, "best": BEST, "ema": AVERAGE}
"""The files with weights of a run."""
WEIGHT_HASHES = {WEIGHTS: "weights_sha256", BEST: "best_sha256", AVERAGE: "ema_sha256"}
"""Their hashes in the summary."""


def read_weights(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name; raise ValueError if it is damaged."""
    try:
        return dict(load_file(file))
    except SafetensorError as error:
        reason = first_line(error)
        raise ValueError(
            f"{file} is damaged or not a safetensors file ({reason}): give another, or restore a copy"
        ) from error


def same_weights(weights: Mapping[str, Tensor], file: Path) -> bool:
    """Return whether the file, which may be missing or damaged, holds these weights."""
    try:
        found = read_weights(file)
    except (OSError, ValueError):
        return False
    return found.keys() == weights.keys() and all(found[name].equal(value.cpu()) for name, value in weights.items())


def find_weights(source: str | Path) -> Path:
    """Return the file with weights: `source` itself, or that of the run in the folder `source`."""
    path = Path(source).expanduser()
    if path.is_dir():
        check_finished(path)
        return path / WEIGHTS
    if not path.exists():
        raise ValueError(
            f"--init-from is {source}, which does not exist: give the folder of a run, or a .safetensors file"
        )
    return path


def check_weights(source: str | None, folder: Path) -> None:
    """Raise ValueError if a run in `folder` cannot start from these weights, before anything is written there."""
    if source is None:
        return
    file = find_weights(source)
    if file.resolve() == (folder / WEIGHTS).resolve():
        raise ValueError(f"--init-from is {source}, which the run would overwrite: give another --out")
    read_weights(file)


def init_weights(network: nn.Module, source: str, vocabulary_files: Mapping[str, bytes]) -> str:
    """Initialise a network with the weights of a run or a file.

    Tensors of another shape, like those of a head for another number of classes, keep their values.

    Args:
        network: The network.
        source: The folder of a run, or a safetensors file.
        vocabulary_files: The files that define the tokens of the data that the network will be trained on.

    Returns:
        A message about the weights that were used.

    Raises:
        ValueError: If the weights are of another network, or damaged.
    """
    file = find_weights(source)
    weights = read_weights(file)
    check_names(network, weights, file)
    other, own = other_shapes(network, weights), network.state_dict()
    parameters = [name for name, _ in network.named_parameters()]  # buffers such as batch counters fit any network
    if len(unlike := set(parameters).intersection(other)) > len(parameters) / 2:
        raise ValueError(
            f"{len(unlike)} of the {len(parameters)} parameters in {file}, such as {min(unlike)}, have another shape "
            "in this network: build it with the same options, such as --width, or leave --init-from out"
        )
    if Path(source).expanduser().is_dir():
        check_hash({name: weights[name] for name in own}, file.parent)
    with torch.no_grad():
        for name in own.keys() - set(other):
            own[name].copy_(weights[name])
    kept = f"; of another shape there, so initialised randomly: {', '.join(other)}" if other else ""
    before = [file.with_name(name) for name in (VOCABULARY, TOKENIZER)] if file.name == WEIGHTS else []
    remedy = "restore a copy, because it defines the tokens"
    known = {path.name: read_bytes(path.parent, path.name, remedy) for path in before if path.exists()}
    renamed = "; its vocabulary differs, so tokens stand for other texts" * (known not in ({}, vocabulary_files))
    return f"starts from the weights of {file}{kept}{renamed}"


def weight_file(folder: Path, weights: str) -> Path:
    """Return the file of a finished run with these weights: `last`, `best` or `ema`."""
    if weights not in WEIGHT_FILES:
        raise ValueError(f"weights is {weights!r}: {suggestion(weights, list(WEIGHT_FILES))}")
    file = folder / WEIGHT_FILES[weights]
    if not file.exists():
        why = {"best": "was trained with --no-save-best", "ema": "was trained without --ema"}[weights]
        if WEIGHT_HASHES[file.name] in read_summary(folder):
            raise ValueError(f"{file} is missing: restore a copy, or use the last weights")
        raise ValueError(f"{file} does not exist: the run {why}, so it has the last weights only")
    return file


def weight_hashes(folder: Path, names: Sequence[str], best: str | None) -> dict[str, str]:
    """Return the hashes of the best and averaged weights of a run for its summary.

    Args:
        folder: The folder of the run.
        names: The order of the tensors.
        best: The hash of the best weights when they were written; None if it is not known.

    Returns:
        Hashes by their names in the summary.

    Raises:
        ValueError: If a file is damaged.
    """
    hashes = {} if best is None else {WEIGHT_HASHES[BEST]: best}
    for name, key in WEIGHT_HASHES.items():
        if name != WEIGHTS and key not in hashes and (folder / name).exists():
            found = read_weights(folder / name)
            if missing := set(names) - found.keys():
                raise ValueError(
                    f"{folder / name} is damaged (it has no {_some(missing)}): restore a copy, or remove it"
                )
            hashes[key] = weights_hash({n: found[n] for n in names})
    return hashes


def check_hash(weights: Mapping[str, Tensor], folder: Path, name: str = WEIGHTS) -> None:
    """Raise ValueError unless `weights`, in the order of the network, have the hash in the summary of the run."""
    if weights_hash(weights) != read_summary(folder).get(WEIGHT_HASHES[name]):
        if name != WEIGHTS:
            raise ValueError(
                f"{folder / name} is not what the run wrote (its hash is not the one in {SUMMARY}): restore a copy"
            )
        raise ValueError(
            f"{folder / WEIGHTS} is not what the run wrote (its hash is not the one in {SUMMARY}): "
            f"restore a copy, or let `petra train --resume --out {folder}` write it again"
        )


def check_names(network: nn.Module, weights: Mapping[str, Tensor], file: Path) -> None:
    """Raise ValueError unless the names of `weights` are those of the network."""
    own = network.state_dict().keys()
    if missing := own - weights.keys():
        raise ValueError(f"{file} has no {_some(missing)}: give weights of the same network")
    if strange := weights.keys() - own:
        raise ValueError(
            f"{file} has {_some(strange)}, which this network does not have: give weights of the same network"
        )


def _some(names: set[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first


def other_shapes(network: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors whose shape in the network differs from that in `weights`."""
    return [name for name, value in network.state_dict().items() if value.shape != weights[name].shape]
