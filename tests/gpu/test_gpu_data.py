"""Batches on a GPU: the same bits as on the CPU, with worker processes and one batch read ahead."""

from pathlib import Path

import pytest
import torch
from helpers.image_files import made_image, same_batches, write_folder
from helpers.libraries import library

from petra.data import Mixing, SampleBatches, StreamBatches, image_transform, load_data, make_batches

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NORMALISE = ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
IMAGES = [(made_image(i, i), i % 3) for i in range(23)]


def to_cpu(batches) -> list:
    found = []
    for x, y in batches:
        assert x.is_cuda
        assert y.is_cuda
        found.append((x.cpu(), y.cpu()))
        x.fill_(7)  # the memory is used for other things while the next batch is copied
        torch.cuda._sleep(1_000_000)
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [SampleBatches, StreamBatches])
def test_batches_on_a_gpu_are_those_of_the_cpu(kind, workers: int) -> None:
    common = {"transform": image_transform(32, "crop-flip"), "normalise": NORMALISE, "seed": 1}
    wanted = list(kind(IMAGES, 4, **common).epoch(1))
    there = kind(IMAGES, 4, **common, workers=workers, device="cuda")
    found = to_cpu(there.epoch(1))
    there.close()
    assert all(torch.equal(y, v) for (_, y), (_, v) in zip(found, wanted, strict=True))
    for (x, _), (u, _) in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, u, rtol=1e-6, atol=1e-6)  # a GPU fuses multiplication and addition


def test_mixing_and_memory_format_on_a_gpu() -> None:
    common = {"transform": image_transform(32), "normalise": NORMALISE, "mixing": Mixing(3, 0.5, 1.0)}
    wanted = list(SampleBatches(IMAGES, 5, **common).epoch(0))
    found = list(SampleBatches(IMAGES, 5, **common, device="cuda", channels_last=True).epoch(0))
    for (x, y), (u, v) in zip(found, wanted, strict=True):
        assert x.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(x.cpu(), u, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y.cpu(), v, rtol=1e-6, atol=1e-6)


def test_torchvision_with_workers(tmp_path: Path) -> None:
    library("torchvision.transforms.v2")
    data = load_data(str(write_folder(tmp_path, {"train": 6, "val": 2})), image_size=32)
    here = make_batches(data, "train", 4, backend="torchvision", augment="randaugment")
    there = make_batches(data, "train", 4, backend="torchvision", augment="randaugment", workers=2)
    assert same_batches(list(here.epoch(0)), list(there.epoch(0)))
    there.close()
