"""Batches: a pure function of seed, epoch and index, compared with a slow reference."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers.data_files import equal, numbered, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petra.data import Batches, load_data
from petra.data.dataset import keyed_generator
from petra.data.image_split import crop_and_flip, draw_augmentation


@settings(deadline=None, max_examples=60)
@given(count=st.integers(1, 40), size=st.integers(1, 50), epoch=st.integers(0, 5), seed=st.integers())
def test_an_epoch_covers_each_sample_exactly_once(count: int, size: int, epoch: int, seed: int) -> None:
    batches = Batches(numbered(count), "train", size, seed=seed, augment=False)
    seen = list(batches.epoch(epoch))
    assert batches.samples == count
    assert len(seen) == len(batches) == -(-count // size)
    assert [len(y) for _, y in seen[:-1]] == [size] * (len(seen) - 1)
    labels = torch.cat([y for _, y in seen])
    assert labels.sort().values.tolist() == list(range(count))
    assert torch.equal(torch.cat([x for x, _ in seen]), numbered(count).train_images[labels])


@settings(deadline=None, max_examples=40)
@given(count=st.integers(1, 30), size=st.integers(1, 30), epoch=st.integers(0, 3), data=st.data())
def test_resuming_gives_the_rest_of_the_epoch(count: int, size: int, epoch: int, data: st.DataObject) -> None:
    batches = Batches(numbered(count, crop_padding=1, flip=True), "train", size, seed=3)
    start = data.draw(st.integers(0, len(batches)))
    whole = list(batches.epoch(epoch))
    assert equal(list(batches.epoch(epoch, start)), whole[start:])


def test_batches_depend_on_seed_epoch_and_index_alone() -> None:
    data = numbered(32, crop_padding=1, flip=True)

    def run(seed: int, epoch: int) -> list[tuple[Tensor, Tensor]]:
        return list(Batches(data, "train", 8, seed=seed).epoch(epoch))

    batches = Batches(data, "train", 8, seed=1)
    first = list(batches.epoch(0))
    assert equal(first, list(batches.epoch(0)))
    assert equal(first, run(1, 0))
    assert not equal(first, list(batches.epoch(1)))
    assert not equal(first, run(2, 0))
    one, other = batches.epoch(0), batches.epoch(1)  # interleaved iterators do not disturb each other
    mixed = [(next(one), next(other)) for _ in range(len(batches))]
    assert equal([pair[0] for pair in mixed], first)


def test_each_batch_and_epoch_draws_its_own_augmentation() -> None:
    same = dataclasses.replace(
        numbered(64, crop_padding=2), train_images=torch.ones(64, 2, 3, 4)
    )  # only the crops can tell these images apart
    batches = Batches(same, "train", 16)
    seen = [x for epoch in range(2) for x, _ in batches.epoch(epoch)]
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_seeds_are_stable() -> None:
    # Later versions can resume a run only if this number does not change.
    assert keyed_generator(0, "order", 0).initial_seed() == 6759659632403048684
    assert keyed_generator(1, 23).initial_seed() != keyed_generator(12, 3).initial_seed()
    assert keyed_generator(np.int64(7), "x").initial_seed() == keyed_generator(7, "x").initial_seed()


def test_the_global_random_state_is_untouched() -> None:
    before = torch.get_rng_state()
    data = load_data("synthetic:3x8x8:4:20")
    list(Batches(data, "train", 6).epoch(0))
    list(Batches(load_data("digits"), "test", 100).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_test_split_comes_in_order_and_untouched() -> None:
    data = numbered(2, test=7, crop_padding=1, flip=True)
    seen = list(Batches(data, "test", 3).epoch(4))
    assert [y.tolist() for _, y in seen] == [[0, 1, 2], [3, 4, 5], [6]]
    assert torch.equal(torch.cat([x for x, _ in seen]), data.test_images)


def test_batches_never_share_memory_with_the_data() -> None:
    data = numbered(4)
    for split in ("train", "test"):
        for x, y in Batches(data, split, 2, augment=False).epoch(0):
            x.zero_()
            y.zero_()
    assert torch.equal(data.test_images, numbered(4).test_images)
    assert torch.equal(data.train_labels, numbered(4).train_labels)


def test_drop_last_leaves_out_the_uneven_batch() -> None:
    batches = Batches(numbered(10), "train", 4, drop_last=True)
    assert [len(y) for _, y in batches.epoch(0)] == [4, 4]
    assert len(batches) == 2
    assert len(Batches(numbered(8), "train", 4, drop_last=True)) == 2


def slow_crop_and_flip(images: Tensor, augmentation: Tensor, padding: int) -> Tensor:
    """One image and one pixel at a time."""
    n, _, h, w = images.shape
    out = torch.zeros_like(images)
    for i in range(n):
        top, left, mirrored = augmentation[:, i].tolist()
        for y in range(h):
            for x in range(w):
                from_y = y + top - padding
                from_x = (w - 1 - x if mirrored else x) + left - padding
                if 0 <= from_y < h and 0 <= from_x < w:
                    out[i, :, y, x] = images[i, :, from_y, from_x]
    return out


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(*[st.integers(1, 5)] * 4),
    padding=st.integers(0, 4),
    flip=st.booleans(),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.uint8, torch.float32]),
)
def test_crop_and_flip_equal_the_slow_reference(
    shape: tuple[int, ...], padding: int, flip: bool, seed: int, dtype: torch.dtype
) -> None:
    images = torch.randint(1, 256, shape, generator=keyed_generator(seed)).to(dtype)
    augmentation = draw_augmentation(shape[0], padding, flip, keyed_generator(seed, "augmentation"))
    assert torch.equal(crop_and_flip(images, augmentation, padding), slow_crop_and_flip(images, augmentation, padding))


def test_augmentation_takes_every_value_in_range() -> None:
    top, left, mirrored = draw_augmentation(500, 2, True, keyed_generator(0)).tolist()
    assert set(top) == set(left) == set(range(5))
    assert set(mirrored) == {0, 1}
    assert top != left
    assert set(draw_augmentation(500, 2, False, keyed_generator(0))[2].tolist()) == {0}
    assert set(draw_augmentation(500, 0, True, keyed_generator(0))[:2].flatten().tolist()) == {0}


def test_a_batch_is_cropped_flipped_then_normalised() -> None:
    data = load_data("synthetic:3x16x12:5:30", seed=4)
    order = torch.randperm(30, generator=keyed_generator(9, "order", 2))
    for i, (x, y) in enumerate(Batches(data, "train", 8, seed=9, dtype=torch.float64).epoch(2)):
        index = order[8 * i : 8 * i + 8]
        augmentation = draw_augmentation(len(index), 2, True, keyed_generator(9, "augment", 2, i))
        pixels = slow_crop_and_flip(data.train_images[index], augmentation, 2).double() / 255
        mean, std = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (data.mean, data.std))
        torch.testing.assert_close(x, (pixels - mean) / std, rtol=0, atol=1e-12)
        assert torch.equal(y, data.train_labels[index])


def test_normalised_training_images_have_mean_0_and_std_1() -> None:
    data = load_data("digits")
    x, _ = next(Batches(data, "train", 2000, augment=False).epoch(0))
    assert x.dtype == torch.float32
    assert abs(float(x.mean())) < 1e-5
    assert abs(float(x.std(correction=0)) - 1) < 1e-5


def test_half_precision_rounds_once() -> None:
    data = load_data("synthetic:3x8x8:4:20")
    full = [x for x, _ in Batches(data, "train", 8).epoch(0)]
    half = [x for x, _ in Batches(data, "train", 8, dtype=torch.bfloat16).epoch(0)]
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(full, half, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_device_sees_the_same_batches() -> None:
    data = load_data("synthetic:3x32x32:10:100")
    here = list(Batches(data, "train", 32, seed=5).epoch(1))
    there = list(Batches(data, "train", 32, seed=5, device="cuda").epoch(1))
    assert all(x.is_cuda and y.is_cuda for x, y in there)
    assert equal(here, [(x.cpu(), y.cpu()) for x, y in there])


def test_invalid_arguments_raise() -> None:
    data = numbered(4)
    with refused("'valid'", "'train' or 'test'"):
        Batches(data, "valid", 2)  # type: ignore[arg-type]
    with refused("batch_size is 0"):
        Batches(data, "train", 0)
    with refused("batch_size is 5", "4 images"):
        Batches(data, "train", 5, drop_last=True)
    with refused("augment", "test"):
        Batches(data, "test", 2, augment=True)
    with refused("torch.int64", "float"):
        Batches(data, "train", 2, dtype=torch.int64)
    batches = Batches(data, "train", 2)
    with refused("epoch is -1"):
        batches.epoch(-1)  # at the call, not at the first batch
    for start in (-1, 3):
        with refused(f"start is {start}", "0 to 2"):
            batches.epoch(0, start)


@given(st.integers(1, 4), st.integers(4, 9))
def test_shards_of_replicas_together_are_the_whole_batch(replicas: int, batch_size: int) -> None:
    data = numbered(23, crop_padding=1, flip=True)
    whole = Batches(data, "train", batch_size, seed=3)
    parts = [Batches(data, "train", batch_size, seed=3, shard=(r, replicas)) for r in range(replicas)]
    assert {len(p) for p in parts} == {len(whole)}
    for i, batches in enumerate(zip(*(p.epoch(2) for p in parts), strict=True)):
        images, labels = list(whole.epoch(2))[i]
        weights = [p.weight(i) for p in parts]
        assert whole.size(i) == len(labels)
        assert sum(weights) == pytest.approx(replicas)
        assert all(len(b[1]) > 0 for b in batches)  # a shard without a sample has a placeholder
        real = [b for b, weight in zip(batches, weights, strict=True) if weight > 0]
        assert [w * len(labels) / replicas for w in weights if w > 0] == pytest.approx([len(b[1]) for b in real])
        assert torch.equal(torch.cat([b[0] for b in real]), images)
        assert torch.equal(torch.cat([b[1] for b in real]), labels)


def test_shards_of_the_test_split_leave_no_sample_out() -> None:
    data = numbered(11)
    count = len(data.test_labels)
    parts = [Batches(data, "test", 4, shard=(r, 3)) for r in range(3)]
    assert sum(len(labels) for part in parts for _, labels in part.epoch(0)) == count


def test_a_batch_too_small_for_its_replicas_raises() -> None:
    with pytest.raises(ValueError, match="batch_size is 2 for 3 replicas"):
        Batches(numbered(9), "train", 2, shard=(0, 3))


def test_random_numbers_are_copied_for_many_batches_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petra.data.batches._BATCHES_PER_COPY", 4)
    batches = Batches(numbered(37, crop_padding=1, flip=True), "train", 3, seed=2)
    sent: list[Tensor] = []
    monkeypatch.setattr(batches, "_send", lambda drawn: sent.append(drawn) or drawn)
    some = list(batches.epoch(1, 2))
    assert [tuple(drawn.shape) for drawn in sent] == [(37,), (3, 12), (3, 12), (3, 7)]
    monkeypatch.setattr("petra.data.batches._BATCHES_PER_COPY", 1)
    assert equal(some, list(batches.epoch(1, 2)))
