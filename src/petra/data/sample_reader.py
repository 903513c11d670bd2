"""Turns samples into batches, with random numbers that depend on nothing but seed, epoch and sample."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from petra.data.dataset import keyed_seed
from petra.data.transforms import as_uint8

Columns = tuple[str | tuple[str, ...], str]
"""Names of the input column, or of several, and of the target column."""


@dataclass(frozen=True)
class SampleReader:
    """Turns samples into a batch, in a worker process."""

    transform: Callable[[Any], Any] | None
    """Applied to the input of every sample."""
    columns: Columns | None
    """The columns of samples that are dictionaries."""
    collate: Callable[[list[Any]], Any] | None
    """Makes a batch of inputs."""
    seed: int
    """Seed of the random numbers of all samples."""

    def read(self, sample: Any) -> tuple[Any, Any]:
        """Return the transformed input of a sample, and its target."""
        inputs, target = split_sample(sample, self.columns)
        return (inputs if self.transform is None else self.transform(inputs)), target

    def seed_sample(self, epoch: int, sample: int) -> None:
        """Seed the generators of PyTorch, Python and NumPy for a sample."""
        seed_generators(keyed_seed(self.seed, "sample", epoch, sample))

    def batch(self, samples: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Make a batch of inputs and targets."""
        inputs = (self.collate or collate_inputs)([x for x, _ in samples])
        return inputs, default_collate([y for _, y in samples])


def split_sample(sample: Any, columns: Columns | None, what: str = "sample") -> tuple[Any, Any]:
    """Return the input and the target of a sample or of a batch."""
    if isinstance(sample, Mapping):
        if columns is None:
            raise ValueError(f"a {what} has the columns {', '.join(sample)}: give columns=(input, target)")
        names, target = columns
        for name in (*([names] if isinstance(names, str) else names), target):
            if name not in sample:
                raise ValueError(f"a {what} has no column {name!r}: give columns from {', '.join(sample)}")
        inputs = sample[names] if isinstance(names, str) else tuple(sample[name] for name in names)
        return inputs, sample[target]
    if not (isinstance(sample, tuple | list) and len(sample) == 2):
        raise ValueError(f"a {what} is a {type(sample).__name__}: give pairs of input and target, or dictionaries")
    inputs, target = sample
    return (tuple(inputs) if isinstance(inputs, list) else inputs), target


def seed_generators(seed: int) -> None:
    """Seed the default generators of PyTorch on the CPU, Python and NumPy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def collate_inputs(inputs: list[Any]) -> Any:
    """Stack images; anything else as `torch.utils.data.default_collate` does, with tuples instead of lists."""
    if hasattr(inputs[0], "getbands"):
        return as_uint8(inputs)
    collated = default_collate(inputs)
    return tuple(collated) if isinstance(collated, list) else collated


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the generators of this process, which the seeds of samples replace; not needed in a worker."""
    if get_worker_info() is not None:
        yield
        return
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
