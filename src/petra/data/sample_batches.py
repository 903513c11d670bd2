"""Batches of a data set with samples by index, which worker processes read and augment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from petra.data.batch_plan import BatchPlan, read_bounds
from petra.data.device_batches import Finish, Normalise, read_ahead
from petra.data.mixing import Mixing
from petra.data.sample_reader import Columns, SampleReader, keep_random_state
from petra.data.workers import Workers


class MapDataset(Protocol):
    """A data set with samples by index, such as a `torch.utils.data.Dataset` or a `datasets.Dataset`."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: Any) -> Any:
        """Read a sample: a pair of input and target, or a dictionary."""


@dataclass(frozen=True)
class _ReadByIndex:
    """The work of a worker process."""

    dataset: MapDataset
    reader: SampleReader

    def __call__(self, task: tuple[int, list[int]]) -> tuple[Any, Any]:
        epoch, indices = task
        samples = []
        with keep_random_state():
            for index in indices:
                self.reader.seed_sample(epoch, index)
                samples.append(self.reader.read(self.dataset[index]))
        return self.reader.batch(samples)


class SampleBatches:
    """Batches of a data set with samples by index, as a pure function of (seed, epoch, index).

    Worker processes read the samples, transform them and put them into batches. Before each sample, the default
    generators of PyTorch, Python and NumPy are seeded with a hash of seed, epoch and sample. So random transforms give
    the same results for any number of workers, any batch size, any number of shards, and from any batch on. This also
    holds for those inside the data set.

    Args:
        dataset: The data set: `dataset[i]` is a pair of input and target, or a dictionary. Never larger than what its
            `__getitem__` reads at a time.
        batch_size: Samples per batch, over all shards together.
        transform: A function that is applied to the input of every sample, such as one of `petra.data.transforms` or
            `torchvision.transforms.v2`. Images leave it as Pillow images or uint8 tensors.
        columns: For samples that are dictionaries: the name of the input column, or a tuple of names, and that of the
            target column.
        collate: A function that makes a batch from a list of inputs; by default images and tensors are stacked.
        normalise: Mean and standard deviation of each channel, of pixel values scaled to [0, 1]. Images are
            normalised by them on the device. By default, inputs stay as they are.
        mixing: Mix the images of each batch; targets are then class probabilities.
        seed: Seed of order and transforms.
        shuffle: Take the samples of each epoch in another order.
        drop_last: Omit the last batch of an epoch if it has fewer than `batch_size` samples.
        workers: Number of worker processes; 0 to read in this process.
        device: Device of the batches.
        dtype: Floating-point type of normalised images.
        shard: `(r, R)` to get the r-th of R parts of every batch. A part of a shuffled batch is never empty: if the
            batch has fewer than R samples, the remaining parts are a placeholder sample with `weight` 0.
        channels_last: Convert images to PyTorch's channels-last memory format.
        timeout: Seconds after which a batch of a worker is an error; 0 for no limit.
        start_method: How worker processes are started, such as `"spawn"`; None for the default of Python.

    Raises:
        ValueError: If an argument is invalid, or if `drop_last` leaves no batch.

    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int,
        *,
        transform: Callable[[Any], Any] | None = None,
        columns: Columns | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        normalise: tuple[Sequence[float], Sequence[float]] | None = None,
        mixing: Mixing | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        workers: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        shard: tuple[int, int] = (0, 1),
        channels_last: bool = False,
        timeout: float = 0,
        start_method: str | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: give 1 or more")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}: give a floating-point type such as torch.float32")
        if shuffle and batch_size < shard[1]:
            raise ValueError(
                f"batch_size is {batch_size} for {shard[1]} replicas: give at least one sample per replica"
            )
        samples = len(dataset)
        if samples == 0 or (drop_last and samples < batch_size):
            raise ValueError(f"the data set has {samples} samples: give more, a smaller batch_size or no drop_last")
        self.batch_size, self.samples, self.seed, self.device = batch_size, samples, seed, torch.device(device)
        self._plan = BatchPlan(samples, batch_size, drop_last, shuffle, seed, shard)
        self._finish = Finish(
            None if normalise is None else Normalise(*normalise, self.device, dtype), mixing, channels_last, seed, shard
        )
        self._workers = Workers(
            _ReadByIndex(dataset, SampleReader(transform, columns, collate, seed)),
            workers,
            pin_memory=self.device.type == "cuda",
            timeout=timeout,
            context=start_method,
        )

    def __len__(self) -> int:
        return len(self._plan)

    def size(self, index: int) -> int:
        """Return the number of samples in a batch, over all shards together.

        Args:
            index: Index of the batch in the epoch.

        Returns:
            `batch_size`, or less for the last batch.

        """
        return self._plan.size(index)

    def weight(self, index: int) -> float:
        """Return the weight of this shard of a batch in a mean over all shards.

        Args:
            index: Index of the batch in the epoch.

        Returns:
            1 if all shards have the same number of samples, 0 for a placeholder sample.

        """
        return self._plan.weight(index)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Any]]:
        """Iterate over the batches of an epoch. With workers, this ends the iterator of an earlier call.

        Args:
            epoch: Index of the epoch.
            start: Index of the first batch.

        Returns:
            An iterator over batches `start`, `start + 1`, … as (inputs, targets).

        Raises:
            ValueError: If `epoch` or `start` is out of range.

        """
        self._plan.check_start(epoch, start)
        order, size = self._plan.order(epoch), self.batch_size
        parts = {i: self._part(i) for i in range(start, len(self))}
        parts = {i: (low, high) for i, (low, high) in parts.items() if low < high}
        tasks = ((epoch, order[i * size + low : i * size + high].tolist()) for i, (low, high) in parts.items())
        numbered = zip(parts, self._workers.run(tasks), strict=True)

        def finish(item: tuple[int, tuple[Any, Any]]) -> tuple[int, tuple[Any, Any]]:
            index, (inputs, targets) = item
            return index, self._finish(inputs, targets, self.size(index), epoch, index)

        return (batch for _, batch in read_ahead(numbered, self.device, finish))

    def close(self) -> None:
        """End the worker processes; another epoch starts them again."""
        self._workers.close()

    def _part(self, index: int) -> tuple[int, int]:
        """Where the samples that this shard reads start and end in the batch."""
        pairs = self._finish.mixing is not None
        return read_bounds(self.size(index), self._plan.shard, pairs, placeholder=self._plan.shuffle)
