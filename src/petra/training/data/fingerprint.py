"""Tells whether a data set is still the one that a run began with."""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from petra.training.data.protocol import Data


def fingerprint(data: Data) -> str:
    """A hash of all samples, and of the vocabulary."""
    found = hashlib.sha256()
    assert is_dataclass(data)
    for each in fields(data):
        value = getattr(data, each.name)
        if isinstance(value, Tensor):
            found.update(f"{each.name} {tuple(value.shape)} {value.dtype}".encode())
            found.update(value.contiguous().view(torch.uint8).numpy().data)
    found.update("\0".join(data.vocabulary).encode())
    return found.hexdigest()
