"""Weights in safetensors files: read with care, and taken over as where a training begins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from petra.errors import first_line
from petra.training.files import SUMMARY, VOCABULARY, WEIGHTS, refuse_unfinished
from petra.training.summary import read_summary
from petra.training.trainer import weights_hash


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a file under their names."""
    try:
        return dict(load_file(file))
    except SafetensorError as error:
        reason = first_line(error)
        raise ValueError(f"{file} is damaged, or no safetensors file ({reason}): give another, or a copy") from error


def same_weights(weights: Mapping[str, Tensor], file: Path) -> bool:
    """Whether these are the weights in the file, which may be missing or damaged."""
    try:
        found = read_weights(file)
    except (OSError, ValueError):
        return False
    return found.keys() == weights.keys() and all(found[name].equal(value.cpu()) for name, value in weights.items())


def find_weights(source: str | Path) -> Path:
    """The file with weights: ``source`` itself, or that of a run in a folder."""
    path = Path(source).expanduser()
    if path.is_dir():
        refuse_unfinished(path)
        return path / WEIGHTS
    if not path.exists():
        raise ValueError(f"--weights is {source}, which is not there: give the folder of a run, or a .safetensors file")
    return path


def check_weights(source: str | None, folder: Path) -> None:
    """Raise ValueError if a run in ``folder`` cannot begin with these weights, before anything is written there."""
    if source is None:
        return
    file = find_weights(source)
    if file.resolve() == (folder / WEIGHTS).resolve():
        raise ValueError(f"--weights is {source}, which the run would write over: give another --out")
    read_weights(file)


def take_weights(network: nn.Module, source: str, vocabulary: Sequence[str] = ()) -> str:
    """Give a network the weights of a run or a file, and say so in a line.

    Tensors of another shape, like those of a head for another number of classes, keep the values that they have.
    ``vocabulary`` is that of the network's data from now on.
    """
    file = find_weights(source)
    weights = read_weights(file)
    check_names(network, weights, file)
    other, own = other_shapes(network, weights), network.state_dict()
    parameters = [name for name, _ in network.named_parameters()]  # a counter of batches fits everywhere
    if len(unlike := set(parameters).intersection(other)) > len(parameters) / 2:
        raise ValueError(
            f"{len(unlike)} of the {len(parameters)} parameters in {file}, {min(unlike)} for one, have another shape "
            "in this network: build it as there, with the same --width and the like, or leave --weights out"
        )
    if Path(source).expanduser().is_dir():
        refuse_changed({name: weights[name] for name in own}, file.parent)
    with torch.no_grad():
        for name in own.keys() - set(other):
            own[name].copy_(weights[name])
    kept = f"; of another shape there, so drawn anew: {', '.join(other)}" if other else ""
    before = file.with_name(VOCABULARY)
    known = json.loads(before.read_text()) if file.name == WEIGHTS and before.exists() else list(vocabulary)
    renamed = "; its vocabulary is another, so tokens stand for other texts than they did" * (known != list(vocabulary))
    return f"begins with the weights of {file}{kept}{renamed}"


def refuse_changed(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Raise ValueError unless ``weights``, in the order that the network has them, are those that the run wrote."""
    if weights_hash(weights) != read_summary(folder / SUMMARY).get("weights_sha256"):
        raise ValueError(
            f"{folder / WEIGHTS} is not what the run wrote, by the hash in {SUMMARY}: "
            f"put back a copy, or have `petra train --resume --out {folder}` write it anew"
        )


def check_names(network: nn.Module, weights: Mapping[str, Tensor], file: Path) -> None:
    """Raise ValueError unless ``weights`` have the names that the network has."""
    own = network.state_dict().keys()
    if missing := own - weights.keys():
        raise ValueError(f"{file} has no {_some(missing)}: give weights of the same network")
    if strange := weights.keys() - own:
        raise ValueError(f"{file} has {_some(strange)}, which this network has not: give weights of the same network")


def _some(names: set[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first


def other_shapes(network: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that have another shape in the network than in ``weights``."""
    return [name for name, value in network.state_dict().items() if value.shape != weights[name].shape]
