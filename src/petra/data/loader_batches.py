"""Batches of a `torch.utils.data.DataLoader`, and of a `StatefulDataLoader` of torchdata."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sized
from typing import Any, Protocol

import torch

from petra.data.dataset import keyed_seed
from petra.data.device_batches import read_ahead
from petra.data.sample_reader import Columns, keep_random_state, seed_generators, split_sample


class Loader(Protocol):
    """An iterable over batches, such as a `torch.utils.data.DataLoader`."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of an epoch."""


class LoaderBatches:
    """Batches of a `DataLoader` or another iterable, as a function of seed, epoch and index.

    Before an epoch, this seeds the `generator` of the loader and of its samplers with a hash of seed and epoch, and
    calls their `set_epoch`. While a batch is read, the default generators of PyTorch, Python and NumPy have the seed
    (seed, epoch, index); they are restored afterwards. So an epoch has the same batches whenever it is read, as long as
    the number of workers of the loader stays the same.

    A loader with `state_dict` and `load_state_dict`, such as torchdata's `StatefulDataLoader`, is resumed where it was.
    Others are read from the beginning of the epoch up to that position. `SampleBatches` jumps to any batch, and does
    not depend on the number of workers.

    Args:
        loader: The loader. Its batches are pairs of inputs and targets, or dictionaries.
        columns: For batches that are dictionaries: the name of the input, or a tuple of names, and that of the target.
        seed: Seed of order and random transforms.
        device: Copy batches to this device one ahead; by default they stay where they are.

    Raises:
        ValueError: If the loader can be read only once.

    """

    def __init__(
        self,
        loader: Loader,
        *,
        columns: Columns | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        if isinstance(loader, Iterator):
            raise ValueError(f"the loader is a {type(loader).__name__}, which can be read only once: give a DataLoader")
        self.loader, self.seed, self._columns = loader, seed, columns
        self._device = None if device is None else torch.device(device)
        self._resumable = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._epoch, self._batch, self._state = 0, 0, None
        self._loaded: dict[str, Any] | None = None

    def __len__(self) -> int:
        if not isinstance(self.loader, Sized):
            raise TypeError(f"the length of a {type(self.loader).__name__} is unknown")
        return len(self.loader)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Any]]:
        """Iterate over the batches of an epoch.

        Args:
            epoch: Index of the epoch.
            start: Index of the first batch. If a state has been loaded for this position, the loader continues there;
                otherwise the batches before are read again.

        Returns:
            An iterator over batches `start`, `start + 1`, … as (inputs, targets).

        Raises:
            ValueError: If `epoch` or `start` is negative.

        """
        if epoch < 0 or start < 0:
            raise ValueError(f"epoch is {epoch} and start is {start}: give 0 or more")
        loaded, self._loaded = self._loaded, None
        if loaded is not None and (loaded["epoch"], loaded["batch"]) != (epoch, start):
            loaded = None
        self._epoch, self._batch, self._state = epoch, start, None if loaded is None else loaded["loader"]
        return self._iterate(epoch, start, self._state)

    def state_dict(self) -> dict[str, Any]:
        """Describe the position after the last batch that was returned.

        Returns:
            Plain values, and the state of the loader if it has one.

        """
        return self._loaded or {"epoch": self._epoch, "batch": self._batch, "loader": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next call of `epoch` continue at a position.

        Args:
            state: What `state_dict` returned.

        """
        self._loaded = dict(state)

    def _iterate(self, epoch: int, start: int, state: Any) -> Iterator[tuple[Any, Any]]:
        states = self._read(epoch, start, state)
        for at, batch in states if self._device is None else read_ahead(states, self._device):
            self._epoch, self._batch, self._state = epoch, self._batch + 1, at
            yield batch

    def _read(self, epoch: int, start: int, state: Any) -> Iterator[tuple[Any, tuple[Any, Any]]]:
        """Each batch, and the state of the loader after it."""
        key = self.seed, "loader", epoch
        with keep_random_state():
            seed_generators(keyed_seed(*key))
            self._begin_epoch(epoch)
            if state is not None:
                self._load(state)
            batches = iter(self.loader)
        index = 0 if state is None else start
        while True:
            with keep_random_state():
                seed_generators(keyed_seed(*key, index))
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            index += 1
            if index > start:
                yield self._save(), split_sample(batch, self._columns, "batch")

    def _begin_epoch(self, epoch: int) -> None:
        sampler, batch_sampler = (getattr(self.loader, name, None) for name in ("sampler", "batch_sampler"))
        parts = (self.loader, getattr(self.loader, "dataset", None), sampler, batch_sampler)
        for part in (*parts, getattr(batch_sampler, "sampler", None)):
            if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                generator.manual_seed(keyed_seed(self.seed, "loader", epoch))
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)

    def _save(self) -> Any:
        return copy.deepcopy(self.loader.state_dict()) if self._resumable else None  # type: ignore[attr-defined]

    def _load(self, state: Any) -> None:
        self.loader.load_state_dict(copy.deepcopy(state))  # type: ignore[attr-defined]
