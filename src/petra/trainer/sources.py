"""Makes a source of batches of any iterable, so that a training can be resumed exactly."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch

from petra.data import BatchSource
from petra.distributed import RankPosition


def as_source(data: Any, seed: int = 0, position: RankPosition | None = None) -> BatchSource:
    """Return a source of batches for training data.

    Args:
        data: A source of batches with `epoch(epoch, start)`, or any iterable of (inputs, targets).
        seed: Decides the order in which a shuffling loader returns its samples.
        position: The position of this process.

    Returns:
        The source.

    Raises:
        ValueError: If the data is neither.
    """
    if isinstance(data, BatchSource):
        return data
    if not isinstance(data, Iterable) or isinstance(data, str | bytes | dict):
        raise ValueError(
            f"the training data is a {type(data).__name__}: give batches of (inputs, targets), such as a DataLoader, "
            "or an object with epoch(epoch, start)"
        )
    return LoaderSource(data, seed, (position or RankPosition()).replica)


class LoaderSource:
    """The batches of an iterable, such as a list or a `DataLoader`.

    Its random numbers, from `torch`, `random` and NumPy, are those of (seed, epoch): a `DataLoader` with
    `shuffle=True` has the same order in every training with the same seed, and the training leaves the generators of
    the program alone. A generator that the loader was given keeps its own numbers, and its state is saved. A resumed
    epoch reads the batches before its start again and drops them, unless the iterable has a `state_dict`, as a
    `StatefulDataLoader` has.

    Args:
        loader: The iterable; it is iterated over once per epoch.
        seed: The seed of the training.
        replica: The replica of this process; replicas draw different numbers.
    """

    def __init__(self, loader: Iterable[Any], seed: int = 0, replica: int = 0) -> None:
        self._loader, self._key = loader, (seed, replica)
        self._stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
        self._generators = _generators_of(loader)
        self._loaded = False
        self._begun: list[torch.Tensor] | None = None  # generator states at the start of the epoch

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError("the number of batches is unknown")
        return len(self._loader)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Any]]:
        """Iterate over the batches of an epoch.

        Args:
            epoch: Index of the epoch.
            start: Index of the first batch.

        Returns:
            An iterator over batches `start`, `start + 1`, … as (inputs, targets).
        """
        if callable(set_epoch := getattr(getattr(self._loader, "sampler", None), "set_epoch", None)):
            set_epoch(epoch)
        skip, self._loaded = 0 if self._loaded else start, False
        self._begun = [generator.get_state() for generator in self._generators]
        numbers = _RandomNumbers("data", *self._key, epoch)
        with numbers:
            batches = iter(self._loader)
        for index in range(skip):
            if _next(batches, numbers) is None:
                raise ValueError(f"the training data ends after {index} batches, but {start} were used before")
        while (batch := _next(batches, numbers)) is not None:
            if not (isinstance(batch, tuple | list) and len(batch) == 2):
                kind = f"{len(batch)} entries" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
                raise ValueError(
                    f"a batch of the training data is {kind}: give (inputs, targets); several inputs are a tuple"
                )
            yield batch[0], batch[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader, if it has one, and the generators that it was given.

        Returns:
            The state.
        """
        if self._stateful:
            return {"loader": self._loader.state_dict()}  # type: ignore[attr-defined]
        begun = self._begun if self._begun is not None else [g.get_state() for g in self._generators]
        now = [generator.get_state() for generator in self._generators]
        return {"begun": begun, "now": now}

    def load_state_dict(self, state: dict[str, Any], within: bool = True) -> None:
        """Continue from a state.

        Args:
            state: What `state_dict` returned.
            within: Whether the epoch of the state continues; otherwise, the next one begins.
        """
        if self._stateful:
            self._loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            self._loaded = True
            return
        for generator, own in zip(self._generators, state["begun" if within else "now"], strict=True):
            generator.set_state(own.cpu())


class _RandomNumbers:
    """Random numbers of their own, in a `with` block that can be entered again.

    Args:
        key: What the seed is derived from.
    """

    def __init__(self, *key: int | str) -> None:
        digest = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
        numbers = _numpy_random()
        self._states: list[Any] = [
            torch.Generator().manual_seed(seed).get_state(),
            random.Random(seed).getstate(),  # noqa: S311 - the order of samples
            None if numbers is None else numbers.RandomState(seed % 2**32).get_state(),
        ]
        self._outer: list[Any] = []

    def __enter__(self) -> None:
        self._outer = _states()
        _set_states(self._states)

    def __exit__(self, *_: object) -> None:
        self._states = _states()
        _set_states(self._outer)


def _next(batches: Iterator[Any], numbers: _RandomNumbers) -> Any:
    with numbers:
        return next(batches, None)


def _states() -> list[Any]:
    numbers = _numpy_random()
    return [torch.get_rng_state(), random.getstate(), None if numbers is None else numbers.get_state()]


def _set_states(states: list[Any]) -> None:
    numbers = _numpy_random()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if numbers is not None and states[2] is not None:
        numbers.set_state(states[2])


def _numpy_random() -> Any:
    """Return NumPy's random module; None where NumPy is not installed."""
    try:
        import numpy.random
    except ImportError:
        return None
    return numpy.random


def _generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers were given."""
    sampler = getattr(loader, "sampler", None)
    owners = (loader, sampler, getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
