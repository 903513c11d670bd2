"""Batches of a stream of samples, such as a data set that is read over the network."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch

from petra.data.batch_plan import part_bounds, read_bounds
from petra.data.dataset import keyed_generator
from petra.data.device_batches import Finish, Normalise, read_ahead
from petra.data.mixing import Mixing
from petra.data.sample_reader import Columns, SampleReader, keep_random_state
from petra.data.workers import Workers


@runtime_checkable
class ResumableStream(Protocol):
    """A stream that knows its position, such as a `datasets.IterableDataset`."""

    def state_dict(self) -> dict[str, Any]:
        """Describe the position."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position."""


@dataclass(frozen=True)
class _Position:
    """A position in an epoch."""

    epoch: int
    batch: int
    """Batches so far."""
    block: int
    """Samples before the block of the next one."""
    stream: dict[str, Any] | None
    """The state of the stream before this block."""


@dataclass(frozen=True)
class _Block:
    """Samples that are read together."""

    start: int
    """Samples before it."""
    before: dict[str, Any] | None
    """The state of the stream before it."""
    after: dict[str, Any] | None
    """The state of the stream after it. If the stream has ended, this may be its beginning."""
    last: bool
    """The stream has ended."""


@dataclass
class _ReadSamples:
    """The work of a worker process."""

    reader: SampleReader

    def __call__(self, task: tuple[int, list[tuple[int, Any]]]) -> tuple[Any, Any]:
        epoch, samples = task
        batch = []
        with keep_random_state():
            for position, sample in samples:
                self.reader.seed_sample(epoch, position)
                batch.append(self.reader.read(sample))
        return self.reader.batch(batch)


class StreamBatches:
    """Batches of a stream of samples.

    This process reads the stream; worker processes transform its samples and put them into batches. Random transforms
    depend on seed, epoch and the position of the sample in the stream, so batches are the same for any number of
    workers and shards.

    A stream with `state_dict` and `load_state_dict` is resumed where it was. Others are read again up to that position,
    without transforms. Each replica reads the whole stream and takes its part of every batch.

    Args:
        stream: The samples of an epoch, each a pair of input and target or a dictionary. It is iterated over once for
            every epoch, after its `set_epoch(epoch)` if it has one. Or a function of the epoch that returns them.
        batch_size: Samples per batch, over all shards together.
        transform: A function that is applied to the input of every sample in a worker process. Let the stream deliver
            encoded images and decode them here.
        columns: For samples that are dictionaries: the name of the input column, or a tuple of names, and that of the
            target column.
        collate: A function that makes a batch from a list of inputs; by default images and tensors are stacked.
        normalise: Mean and standard deviation of each channel, of pixel values scaled to [0, 1].
        mixing: Mix the images of each batch; targets are then class probabilities.
        seed: Seed of order and transforms.
        shuffle_block: Read so many samples at a time, and take them in random order. Unlike the buffer of
            `datasets.IterableDataset.shuffle`, this resumes exactly. 0 for the order of the stream.
        samples: Number of samples in an epoch, if it is known.
        drop_last: Omit the last batch of an epoch if it has fewer than `batch_size` samples.
        workers: Number of worker processes; 0 for none.
        device: Device of the batches.
        dtype: Floating-point type of normalised images.
        shard: `(r, R)` to get the r-th of R parts of every batch. If a batch has fewer than R samples, the remaining
            parts are a placeholder sample with `weight` 0.
        channels_last: Convert images to PyTorch's channels-last memory format.
        timeout: Seconds after which a batch of a worker is an error; 0 for no limit.
        start_method: How worker processes are started, such as `"spawn"`; None for the default of Python.

    Raises:
        ValueError: If an argument is invalid.

    """

    def __init__(
        self,
        stream: Iterable[Any] | Callable[[int], Iterable[Any]],
        batch_size: int,
        *,
        transform: Callable[[Any], Any] | None = None,
        columns: Columns | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        normalise: tuple[Sequence[float], Sequence[float]] | None = None,
        mixing: Mixing | None = None,
        seed: int = 0,
        shuffle_block: int = 0,
        samples: int | None = None,
        drop_last: bool = False,
        workers: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        shard: tuple[int, int] = (0, 1),
        channels_last: bool = False,
        timeout: float = 0,
        start_method: str | None = None,
    ) -> None:
        if batch_size < max(1, shard[1]):
            raise ValueError(f"batch_size is {batch_size}: give at least one sample for each of {shard[1]} replicas")
        if shuffle_block < 0:
            raise ValueError(f"shuffle_block is {shuffle_block}: give 0 or more")
        if isinstance(stream, Iterator):
            raise ValueError(
                f"the stream is a {type(stream).__name__}, which can be read only once: give an iterable, or a "
                "function of the epoch"
            )
        self.batch_size, self.samples, self.seed, self.device = batch_size, samples, seed, torch.device(device)
        self._stream, self._shard, self._drop_last = stream, shard, drop_last
        self._shuffle, self._block = shuffle_block > 0, shuffle_block or batch_size
        self._initial = copy.deepcopy(stream.state_dict()) if isinstance(stream, ResumableStream) else None
        self._finish = Finish(
            None if normalise is None else Normalise(*normalise, self.device, dtype), mixing, channels_last, seed, shard
        )
        self._workers = Workers(
            _ReadSamples(SampleReader(transform, columns, collate, seed)),
            workers,
            pin_memory=self.device.type == "cuda",
            timeout=timeout,
            context=start_method,
        )
        self._position = _Position(0, 0, 0, self._initial)
        self._loaded: _Position | None = None
        self._last_size = batch_size

    def __len__(self) -> int:
        if self.samples is None:
            raise TypeError("the number of samples in an epoch is unknown: give it as samples=")
        full, remainder = divmod(self.samples, self.batch_size)
        return full + (remainder > 0 and not self._drop_last)

    def size(self, index: int) -> int:
        """Return the number of samples in a batch, over all shards together.

        Args:
            index: Index of the batch in the epoch: the one that was returned last, or an earlier one.

        Returns:
            `batch_size`, or less for the last batch.

        """
        return self._last_size if index == self._position.batch - 1 else self.batch_size

    def weight(self, index: int) -> float:
        """Return the weight of this shard of a batch in a mean over all shards.

        Args:
            index: Index of the batch in the epoch: the one that was returned last, or an earlier one.

        Returns:
            1 if all shards have the same number of samples, 0 for a placeholder sample.

        """
        low, high = part_bounds(self.size(index), self._shard)
        return (high - low) * self._shard[1] / self.size(index)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Any]]:
        """Iterate over the batches of an epoch. This ends the iterator of an earlier call.

        Args:
            epoch: Index of the epoch.
            start: Index of the first batch. If a state has been loaded for this position, the stream continues there;
                otherwise the samples before are read again.

        Returns:
            An iterator over batches `start`, `start + 1`, … as (inputs, targets).

        Raises:
            ValueError: If `epoch` or `start` is negative.

        """
        if epoch < 0 or start < 0:
            raise ValueError(f"epoch is {epoch} and start is {start}: give 0 or more")
        position, self._loaded = self._loaded, None
        if position is None or (position.epoch, position.batch) != (epoch, start):
            position = _Position(epoch, start, 0, self._initial)
        self._position = position
        return self._iterate(position)

    def state_dict(self) -> dict[str, Any]:
        """Describe the position after the last batch that was returned.

        Returns:
            Plain values.

        """
        at = self._loaded or self._position
        return {"epoch": at.epoch, "batch": at.batch, "block": at.block, "stream": copy.deepcopy(at.stream)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next call of `epoch` continue at a position.

        Args:
            state: What `state_dict` returned.

        """
        self._loaded = _Position(state["epoch"], state["batch"], state["block"], copy.deepcopy(state["stream"]))

    def close(self) -> None:
        """End the worker processes; another epoch starts them again."""
        self._workers.close()

    def _iterate(self, position: _Position) -> Iterator[tuple[Any, Any]]:
        epoch = position.epoch
        pending: deque[tuple[int, _Position]] = deque()
        results = self._workers.run(self._tasks(position, pending))

        def numbered() -> Iterator[tuple[int, _Position, tuple[Any, Any]]]:
            for batch in results:
                size, after = pending.popleft()
                yield size, after, batch

        def finish(item: tuple[int, _Position, tuple[Any, Any]]) -> tuple[int, _Position, tuple[Any, Any]]:
            size, after, (inputs, targets) = item
            return size, after, self._finish(inputs, targets, size, epoch, after.batch - 1)

        for size, after, batch in read_ahead(numbered(), self.device, finish):
            self._last_size, self._position = size, after
            yield batch

    def _tasks(
        self, position: _Position, pending: deque[tuple[int, _Position]]
    ) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
        """The samples of this shard, batch by batch. `pending` gets size and end of each batch."""
        ordered = self._ordered(position)
        for index in range(position.batch, 2**63):
            read = list(islice(ordered, self.batch_size))
            if not read or (self._drop_last and len(read) < self.batch_size):
                return
            end, epoch, block = (index + 1) * self.batch_size, position.epoch, read[-1][2]
            if end < block.start + self._block or block.last:
                after = _Position(epoch, index + 1, block.start, block.before)
            else:
                after = _Position(epoch, index + 1, block.start + self._block, block.after)
            pending.append((len(read), after))
            pairs = self._finish.mixing is not None
            low, high = read_bounds(len(read), self._shard, pairs, placeholder=True)
            yield epoch, [(number, sample) for number, sample, _ in read[low:high]]

    def _ordered(self, position: _Position) -> Iterator[tuple[int, Any, _Block]]:
        """Number and content of the samples in their order, and the block that they are in."""
        stream, epoch = self._start(position), position.epoch
        skipped = position.batch * self.batch_size - position.block
        # Without a state, the whole blocks before the position are read and dropped.
        start = position.block + skipped // self._block * self._block
        for _ in islice(stream, start - position.block):
            pass
        skipped = position.batch * self.batch_size - start
        before = self._state()
        while samples := list(islice(stream, self._block)):
            block = _Block(start, before, self._state(), len(samples) < self._block)
            order: Sequence[int] = range(len(samples))
            if self._shuffle:
                generator = keyed_generator(self.seed, "block", epoch, start)
                order = torch.randperm(len(samples), generator=generator, device="cpu").tolist()
            for i in order[skipped:]:
                yield start + i, samples[i], block
            if block.last:
                return
            start, before, skipped = start + self._block, block.after, 0

    def _start(self, position: _Position) -> Iterator[Any]:
        """Iterate over the stream from a block on."""
        stream = self._stream
        if not isinstance(stream, Iterable):
            return iter(stream(position.epoch))
        if callable(set_epoch := getattr(stream, "set_epoch", None)):
            set_epoch(position.epoch)
        if isinstance(stream, ResumableStream) and position.stream is not None:
            stream.load_state_dict(copy.deepcopy(position.stream))
        return iter(stream)

    def _state(self) -> dict[str, Any] | None:
        return copy.deepcopy(self._stream.state_dict()) if isinstance(self._stream, ResumableStream) else None
