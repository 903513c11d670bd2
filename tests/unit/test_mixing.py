"""Mixup and CutMix against slow references, also in parts of a batch; loss and accuracy with class probabilities."""

import math

import numpy as np
import pytest
import torch
from helpers.data_files import equal, numbered, refused
from torch import Tensor
from torch.nn import functional as F

from petra.data import Batches, Mixing, load_data
from petra.data.dataset import keyed_generator
from petra.data.mixing import draw_beta, draw_rectangle
from petra.pipeline import MicrobatchResult
from petra.trainer.evaluation import evaluate_network
from petra.trainer.loss import count_correct, cross_entropy
from petra.trainer.progress import RunProgress


def slow_mix(mixing: Mixing, images: Tensor, labels: Tensor, *key: int) -> tuple[Tensor, Tensor]:
    """One pixel at a time."""
    generator = keyed_generator(*key, "mix")
    cut = mixing.cutmix > 0
    if mixing.mixup and mixing.cutmix:
        cut = float(torch.rand((), generator=generator)) < 0.5
    share = draw_beta(mixing.cutmix if cut else mixing.mixup, generator)
    n, _, h, w = images.shape
    inside = [[False] * w for _ in range(h)]
    if cut:
        top, bottom, left, right = draw_rectangle(h, w, share, generator)
        inside = [[top <= y < bottom and left <= x < right for x in range(w)] for y in range(h)]
        share = 1 - sum(map(sum, inside)) / (h * w)
    mixed, targets = images.clone(), torch.zeros(n, mixing.num_classes)
    for i in range(n):
        j = i + 1 if i % 2 == 0 else i - 1
        if j == n:
            targets[i, labels[i]] = 1
            continue
        targets[i, labels[i]] += share
        targets[i, labels[j]] += 1 - share
        for y in range(h):
            for x in range(w):
                if not cut:
                    mixed[i, :, y, x] = images[i, :, y, x] * share + images[j, :, y, x] * (1 - share)
                elif inside[y][x]:
                    mixed[i, :, y, x] = images[j, :, y, x]
    return mixed, targets


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0), (0, 1.0), (0.8, 1.0)])
@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_mixing_equals_a_slow_reference(mixup: float, cutmix: float, count: int) -> None:
    mixing = Mixing(4, mixup, cutmix)
    for index in range(4):
        random = keyed_generator(count, index)
        images, labels = torch.randn(count, 2, 5, 6, generator=random), torch.randint(4, (count,), generator=random)
        before = images.clone()
        found, wanted = mixing(images, labels, 3, 1, index), slow_mix(mixing, images, labels, 3, 1, index)
        assert torch.equal(found[0], wanted[0])
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=1e-7)
        torch.testing.assert_close(found[1].sum(1), torch.ones(count), rtol=0, atol=1e-6)
        assert torch.equal(images, before)


def test_lambda_is_from_a_beta_distribution() -> None:
    generator = keyed_generator(0)
    for alpha in (0.2, 1.0, 4.0):
        drawn = np.array([draw_beta(alpha, generator) for _ in range(4000)])
        assert abs(drawn.mean() - 0.5) < 0.03
        assert abs(drawn.var() - 1 / (4 * (2 * alpha + 1))) < 0.01
    assert draw_beta(1e-300, generator) in (0.0, 1.0)


def test_rectangles_have_the_share_unless_they_are_cut_off() -> None:
    for index in range(200):
        top, bottom, left, right = draw_rectangle(40, 30, 0.75, keyed_generator(index))
        assert 0 <= top <= bottom <= 40
        assert 0 <= left <= right <= 30
        assert bottom - top <= 20
        assert right - left <= 15
    assert draw_rectangle(8, 8, 1.0, keyed_generator(0))[0:2] in [(y, y) for y in range(8)]
    with refused("mixup is -1"):
        Mixing(3, -1)
    with refused("cutmix is nan"):
        Mixing(3, 0.2, math.nan)
    with refused("both 0"):
        Mixing(3)


@pytest.mark.parametrize("count", [13, 16])
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_the_parts_of_a_mixed_batch_are_those_of_the_whole(count: int, shards: int) -> None:
    data, mixing = numbered(count, crop_padding=1, flip=True), Mixing(count, 0.4, 1.0)
    whole = list(Batches(data, "train", 5, seed=1, mixing=mixing).epoch(1))
    plain = list(Batches(data, "train", 5, seed=1).epoch(1))
    for (_, targets), (_, labels) in zip(whole, plain, strict=True):
        assert (targets[torch.arange(len(labels)), labels] > 0).all()
    parts = [Batches(data, "train", 5, seed=1, mixing=mixing, shard=(r, shards)) for r in range(shards)]
    for index, batches in enumerate(zip(*(part.epoch(1) for part in parts), strict=True)):
        kept = [batch for part, batch in zip(parts, batches, strict=True) if part.weight(index)]
        assert torch.equal(torch.cat([x for x, _ in kept]), whole[index][0])
        assert torch.equal(torch.cat([y for _, y in kept]), whole[index][1])
    assert equal(list(Batches(data, "train", 5, seed=1, mixing=mixing).epoch(1, 1)), whole[1:])
    test = Batches(data, "test", 5, mixing=mixing)
    assert next(test.epoch(0))[1].dtype == torch.int64


def test_texts_are_not_mixed(tmp_path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("abcdefgh" * 20)
    with refused("mixing is given", "windows"):
        Batches(load_data(f"text:{file}", seq_len=4), "train", 2, mixing=Mixing(3, 0.2))


def test_loss_and_accuracy_of_class_probabilities() -> None:
    random = keyed_generator(0)
    logits = torch.randn(6, 4, generator=random)
    targets = torch.rand(6, 4, generator=random).softmax(1)
    wanted = -(targets * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(cross_entropy(logits, targets), wanted)
    smooth = 0.9 * targets + 0.1 / 4
    torch.testing.assert_close(
        cross_entropy(logits, targets, 0.1), -(smooth * logits.log_softmax(1)).sum(1).mean(), rtol=1e-5, atol=1e-6
    )
    hard = targets.argmax(1)
    torch.testing.assert_close(cross_entropy(logits, F.one_hot(hard, 4).float()), F.cross_entropy(logits, hard))
    assert count_correct(logits, targets) == count_correct(logits, hard)
    assert count_correct(logits, targets.bfloat16()) is not None
    assert count_correct(logits, targets * 2) < 0  # no probabilities
    assert count_correct(logits, torch.tensor([[1.5, -0.5, 0, 0]]).expand(6, 4)) < 0
    progress = RunProgress()
    progress.count([MicrobatchResult(0, wanted, logits, targets)])
    progress.read()
    assert (progress.correct, progress.samples) == (int(count_correct(logits, hard)), 6)
    network = torch.nn.Sequential(torch.nn.Linear(3, 4))
    x = torch.randn(6, 3, generator=random)
    result = evaluate_network(network, [(x, targets)], cross_entropy)
    assert result.accuracy == evaluate_network(network, [(x, hard)], cross_entropy).accuracy
    assert evaluate_network(network, [(x, targets * 3)], F.mse_loss).accuracy is None
