"""Streams and loaders as sources of batches: resumed exactly, with and without worker processes."""

import copy
import random

import datasets
import numpy as np
import pytest
import torch
from helpers.data_files import refused
from helpers.image_files import encoded, made_image, same_batches
from helpers.libraries import library
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from petra.data import (
    LoaderBatches,
    Mixing,
    ResumableBatchSource,
    StreamBatches,
    batch_count,
    batch_samples,
    batch_weight,
    decode_image,
    image_transform,
)
from petra.data.dataset import keyed_generator, keyed_seed
from petra.data.transforms import Compose

ROWS = [(float(i), i % 3) for i in range(23)]


def noise(x: float) -> torch.Tensor:
    return torch.tensor([x, random.random(), np.random.rand(), torch.rand(()).item()])


class Counted:
    """A stream that knows its position, with other samples in every epoch. It counts what has been read."""

    def __init__(self) -> None:
        self.at, self.epoch, self.read = 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self):
        while self.at < 23:
            self.at, self.read = self.at + 1, self.read + 1
            yield self.at - 1 + 100 * self.epoch, (self.at - 1) % 3
        self.at = 0


def slow_batches(seed: int, epoch: int, size: int, block: int, rows: list) -> list:
    """One sample at a time."""
    order = []
    for first in range(0, len(rows), block or len(rows)):
        inside = list(range(first, min(first + (block or len(rows)), len(rows))))
        if block:
            permutation = torch.randperm(len(inside), generator=keyed_generator(seed, "block", epoch, first))
            inside = [inside[i] for i in permutation]
        order += inside
    batches = []
    for first in range(0, len(order), size):
        inputs = []
        for number in order[first : first + size]:
            key = keyed_seed(seed, "sample", epoch, number)
            torch.manual_seed(key)
            random.seed(key)
            np.random.seed(key % 2**32)
            inputs.append(noise(rows[number][0]))
        batches.append((torch.stack(inputs), torch.tensor([rows[i][1] for i in order[first : first + size]])))
    return batches


@pytest.mark.parametrize("block", [0, 6, 7, 100])
def test_streams_equal_a_slow_reference_and_resume_anywhere(block: int) -> None:
    def make(stream):
        return StreamBatches(stream, 4, transform=noise, seed=3, shuffle_block=block)

    wanted = [slow_batches(3, epoch, 4, block, [(x + 100 * epoch, y) for x, y in ROWS]) for epoch in range(2)]
    source = make(Counted())
    assert isinstance(source, ResumableBatchSource)
    assert all(same_batches(list(source.epoch(epoch)), wanted[epoch]) for epoch in (0, 1))
    for count in range(len(wanted[1]) + 1):
        first = make(Counted())
        iterator = first.epoch(1)
        for _ in range(count):
            next(iterator)
        state = copy.deepcopy(first.state_dict())
        assert (state["epoch"], state["batch"]) == (1, count)
        stream = Counted()
        resumed = make(stream)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert same_batches(list(resumed.epoch(1, count)), wanted[1][count:])
        assert stream.read <= max(23 - 4 * count, 0) + max(block, 4)  # and not from the beginning
        assert same_batches(list(resumed.epoch(1)), wanted[1])
        resumed.load_state_dict(state)
        assert same_batches(list(resumed.epoch(0)), wanted[0])  # the state is for another epoch
        plain = make(lambda epoch: [(x + 100 * epoch, y) for x, y in ROWS])
        assert same_batches(list(plain.epoch(1, count)), wanted[1][count:])


def test_streams_with_workers_and_shards() -> None:
    wanted = slow_batches(3, 1, 4, 6, [(x + 100, y) for x, y in ROWS])
    source = StreamBatches(Counted(), 4, transform=noise, seed=3, shuffle_block=6, workers=2)
    iterator = source.epoch(1)
    begun = [next(iterator) for _ in range(3)]
    state = source.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 3)  # although more has been read ahead
    assert same_batches(begun, wanted[:3])
    source.load_state_dict(state)
    assert same_batches(list(source.epoch(1, 3)), wanted[3:])
    source.close()
    common = {"transform": noise, "seed": 3, "shuffle_block": 6}
    parts = [StreamBatches(Counted(), 4, **common, shard=(r, 4)) for r in range(4)]
    for index, batches in enumerate(zip(*(part.epoch(1) for part in parts), strict=True)):
        assert {batch_samples(part, index, None) for part in parts} == {4 if index < 5 else 3}
        kept = [batch for part, batch in zip(parts, batches, strict=True) if batch_weight(part, index)]
        assert torch.equal(torch.cat([x for x, _ in kept]), wanted[index][0])
    assert len(kept) == 3


def test_the_length_of_a_stream_may_be_unknown() -> None:
    assert batch_count(StreamBatches(ROWS, 4)) is None
    assert batch_count(StreamBatches(ROWS, 4, samples=23)) == 6
    assert batch_count(StreamBatches(ROWS, 4, samples=23, drop_last=True)) == 5
    assert len(list(StreamBatches(ROWS, 4, drop_last=True).epoch(0))) == 5
    for changed, words in (
        ({"batch_size": 0}, "batch_size is 0"),
        ({"shard": (0, 5)}, "each of 5 replicas"),
        ({"shuffle_block": -1}, "shuffle_block is -1"),
        ({"stream": iter(ROWS)}, "can be read only once"),
    ):
        with refused(words):
            StreamBatches(**{"stream": ROWS, "batch_size": 4, **changed})
    with refused("give 0 or more"):
        StreamBatches(ROWS, 4).epoch(0, -1)


def hub_rows() -> datasets.Dataset:
    rows = {"image": [{"bytes": encoded(made_image(i, i)), "path": None} for i in range(9)], "label": [0, 1, 2] * 3}
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def test_images_of_a_hugging_face_stream_resume_exactly() -> None:
    rows = hub_rows().cast_column("image", datasets.Image(decode=False))

    def make() -> StreamBatches:
        return StreamBatches(
            rows.to_iterable_dataset(num_shards=3),
            2,
            transform=Compose(decode_image, image_transform(16, "crop-flip")),
            columns=("image", "label"),
            normalise=((0.5,) * 3, (0.2,) * 3),
            mixing=Mixing(3, 0.4),
            shuffle_block=4,
        )

    whole = list(make().epoch(1))
    assert [x.shape for x, _ in whole] == [(2, 3, 16, 16)] * 4 + [(1, 3, 16, 16)]
    first = make()
    iterator = first.epoch(1)
    next(iterator), next(iterator), next(iterator)
    resumed = make()
    resumed.load_state_dict(first.state_dict())
    assert same_batches(list(resumed.epoch(1, 3)), whole[3:])
    with refused("an image is a int"):
        decode_image(3)


# --- loaders ---


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(23.0)[:, None], torch.arange(23))


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_give_the_same_epoch_again(workers: int) -> None:
    loader = DataLoader(dataset(), batch_size=4, shuffle=True, num_workers=workers)
    before = torch.get_rng_state()
    source = LoaderBatches(loader, seed=1)
    first, second = list(source.epoch(0)), list(source.epoch(1))
    assert torch.equal(before, torch.get_rng_state())
    assert sorted(torch.cat([y for _, y in first]).tolist()) == list(range(23))
    assert not same_batches(first, second)
    assert same_batches(list(LoaderBatches(loader, seed=1).epoch(1, 2)), second[2:])
    assert not same_batches(list(LoaderBatches(loader, seed=2).epoch(0)), first)
    assert batch_count(source) == 6
    assert batch_samples(source, 5, first[5][0]) == 3
    assert batch_weight(source, 5) == 1.0


def test_loaders_with_generators_and_samplers() -> None:
    for loader in (
        DataLoader(dataset(), batch_size=4, shuffle=True, generator=torch.Generator()),
        DataLoader(dataset(), batch_size=4, sampler=WeightedRandomSampler(torch.ones(23), 23)),
    ):
        wanted = list(LoaderBatches(loader).epoch(1))
        assert same_batches(list(LoaderBatches(loader).epoch(1, 3)), wanted[3:])
    rows = DataLoader([{"x": torch.ones(2), "y": i} for i in range(4)], batch_size=4)
    [(x, y)] = LoaderBatches(rows, columns=("x", "y"), device="cpu").epoch(0)
    assert (x.shape, y.tolist()) == ((4, 2), [0, 1, 2, 3])
    with refused("a batch has the columns x, y"):
        list(LoaderBatches(rows).epoch(0))
    with refused("can be read only once"):
        LoaderBatches(iter(rows))
    with refused("give 0 or more"):
        LoaderBatches(rows).epoch(-1)
    assert batch_count(LoaderBatches(DataLoader(hub_rows().to_iterable_dataset()))) is None


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # called by torchdata
@pytest.mark.parametrize("workers", [0, 1])
def test_stateful_loaders_resume_exactly(workers: int) -> None:
    loaders = library("torchdata.stateful_dataloader")

    def make() -> LoaderBatches:
        loader = loaders.StatefulDataLoader(dataset(), batch_size=4, shuffle=True, num_workers=workers)
        return LoaderBatches(loader, seed=1)

    source = make()
    wanted = [list(source.epoch(epoch)) for epoch in range(2)]
    for count in (0, 2, 6):
        first = make()
        iterator = first.epoch(0)
        for _ in range(count):
            next(iterator)
        resumed = make()
        resumed.load_state_dict(first.state_dict())
        assert resumed.state_dict()["batch"] == count
        assert same_batches(list(resumed.epoch(0, count)), wanted[0][count:])
        assert same_batches(list(resumed.epoch(1)), wanted[1])
