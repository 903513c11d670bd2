"""Batches of data sets by index: the same bits for any number of workers and shards, and from any batch on."""

import random

import numpy as np
import pytest
import torch
from helpers.data_files import refused
from helpers.image_files import made_image, same_batches
from torch.utils.data import get_worker_info

from petra.data import BatchSource, Mixing, SampleBatches, batch_count, batch_samples, batch_weight, image_transform
from petra.data.dataset import keyed_generator, keyed_seed

NORMALISE = ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


class Noisy:
    """Samples with random numbers of every library in them."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()]), index % 3


class Images(Noisy):
    def __getitem__(self, index: int):
        if index == 99:
            raise ValueError("image 99 is damaged")
        return made_image(index, index), index % 3


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(4)


def slow_batches(seed: int, epoch: int, size: int, count: int):
    """One sample at a time, each with its own seed."""
    order = torch.randperm(count, generator=keyed_generator(seed, "order", epoch))
    for first in range(0, count, size):
        rows = []
        for index in order[first : first + size].tolist():
            key = keyed_seed(seed, "sample", epoch, index)
            torch.manual_seed(key)
            random.seed(key)
            np.random.seed(key % 2**32)
            rows.append(noise(Noisy(count)[index][0]))
        yield torch.stack(rows), torch.tensor([i % 3 for i in order[first : first + size].tolist()])


def test_batches_equal_a_slow_reference() -> None:
    found = SampleBatches(Noisy(23), 4, transform=noise, seed=5)
    assert isinstance(found, BatchSource)
    for epoch in (0, 2):
        assert same_batches(list(found.epoch(epoch)), list(slow_batches(5, epoch, 4, 23)))
    assert not same_batches(list(found.epoch(0)), list(found.epoch(1)))
    assert (batch_count(found), batch_samples(found, 5, None), batch_weight(found, 5)) == (6, 3, 1.0)
    ordered = SampleBatches(Noisy(23), 4, shuffle=False)
    assert torch.cat([x[:, 0] for x, _ in ordered.epoch(1)]).tolist() == list(range(23))
    assert len(SampleBatches(Noisy(23), 4, drop_last=True)) == 5


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_number_of_workers_does_not_matter(workers: int) -> None:
    transform = image_transform(16, "randaugment")
    common = {"transform": transform, "normalise": NORMALISE, "seed": 1, "mixing": Mixing(3, 0.5)}
    here = SampleBatches(Images(13), 4, **common)
    there = SampleBatches(Images(13), 4, **common, workers=workers)
    wanted = [list(here.epoch(epoch)) for epoch in range(2)]
    assert same_batches(list(there.epoch(0)), wanted[0])
    assert same_batches(list(there.epoch(1, 1)), wanted[1][1:])  # the same processes
    iterator = there.epoch(0)
    next(iterator)
    assert same_batches(list(there.epoch(1)), wanted[1])  # in the middle of another epoch
    with refused("another epoch of these batches has begun"):
        next(iterator)
    there.close()
    assert same_batches(list(there.epoch(0, 2)), wanted[0][2:])  # new processes
    there.close()


@pytest.mark.parametrize("shards", [2, 3, 5])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_number_of_shards_does_not_matter(shards: int, mixed: bool) -> None:
    common = {"transform": image_transform(8, "crop-flip"), "normalise": NORMALISE, "seed": 2}
    common["mixing"] = Mixing(3, 0, 1.0) if mixed else None
    whole = list(SampleBatches(Images(11), 5, **common).epoch(1))
    parts = [SampleBatches(Images(11), 5, **common, shard=(r, shards)) for r in range(shards)]
    for index, batches in enumerate(zip(*(part.epoch(1) for part in parts), strict=True)):
        kept = [batch for part, batch in zip(parts, batches, strict=True) if part.weight(index)]
        assert all(len(x) for x, _ in batches)  # a placeholder where a part is empty
        assert same_batches([tuple(map(torch.cat, zip(*kept, strict=True)))], [whole[index]])
        assert sum(part.weight(index) for part in parts) == pytest.approx(shards)
    test = [SampleBatches(Images(11), 5, **common, shard=(r, shards), shuffle=False) for r in range(shards)]
    assert sum(len(y) for part in test for _, y in part.epoch(0)) == 11


def test_images_are_normalised_in_the_memory_format() -> None:
    transform = image_transform(12)
    for channels_last in (False, True):
        batches = SampleBatches(
            Images(3), 3, transform=transform, normalise=NORMALISE, shuffle=False, channels_last=channels_last
        )
        [(x, y)] = batches.epoch(0)
        wanted = np.stack([np.asarray(transform(made_image(i, i))) for i in range(3)]).transpose(0, 3, 1, 2) / 255
        wanted = (wanted - np.array(NORMALISE[0])[:, None, None]) / np.array(NORMALISE[1])[:, None, None]
        np.testing.assert_allclose(x, wanted, rtol=0, atol=1e-6)
        assert y.tolist() == [0, 1, 2]
        assert x.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_random_states_stay_as_they_were() -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    for workers in (0, 1):
        batches = SampleBatches(Noisy(5), 2, transform=noise, workers=workers)
        list(batches.epoch(0))
        batches.close()
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()


def where(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(0 if get_worker_info() is None else get_worker_info().id + 1)


def test_workers_do_the_work() -> None:
    batches = SampleBatches(Noisy(8), 2, transform=where, workers=2)
    assert [x.tolist() for x, _ in batches.epoch(0)] == [[1, 1], [2, 2]] * 2
    batches.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_are_those_of_the_data(workers: int) -> None:
    batches = SampleBatches(Images(100), 10, transform=image_transform(8), shuffle=False, workers=workers)
    iterator = batches.epoch(0, 9)
    with refused("image 99 is damaged"):
        next(iterator)
    assert len(next(batches.epoch(0))[0]) == 10
    batches.close()


def test_samples_with_columns() -> None:
    rows = [{"a": torch.tensor([float(i)]), "b": torch.tensor(i), "y": i} for i in range(4)]
    [(x, y)] = SampleBatches(rows, 4, columns=("a", "y"), shuffle=False).epoch(0)
    assert x.tolist() == [[0.0], [1.0], [2.0], [3.0]]
    assert y.tolist() == [0, 1, 2, 3]
    [((a, b), _)] = SampleBatches(rows, 4, columns=(("a", "b"), "y"), shuffle=False).epoch(0)
    assert (a.shape, b.shape) == ((4, 1), (4,))
    cases = [
        (rows, {}, "give columns=(input, target)"),
        (rows, {"columns": ("c", "y")}, "no column 'c'"),
        ([(1, 2, 3)], {}, "a sample is a tuple"),
        ([], {}, "has 0 samples"),
        (rows, {"batch_size": 0}, "batch_size is 0"),
        (rows, {"batch_size": 9, "drop_last": True}, "has 4 samples"),
        (rows, {"shard": (0, 5)}, "5 replicas"),
        (rows, {"dtype": torch.int64}, "dtype is torch.int64"),
        (rows, {"workers": -1}, "workers is -1"),
    ]
    for data, changed, words in cases:
        with refused(words):
            list(SampleBatches(data, **{"batch_size": 4, **changed}).epoch(0))
    for numbers in ((-1, 0), (0, 2)):
        with refused("give 0"):
            SampleBatches(rows, 4, columns=("a", "y")).epoch(*numbers)
