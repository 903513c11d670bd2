"""Transforms of images: the same pixels and random numbers as torchvision's, on Pillow images."""

import numpy as np
import pytest
import torch
from helpers.data_files import refused
from helpers.libraries import library
from PIL import Image

from petra.data import image_transform
from petra.data.rand_augment import RandAugment
from petra.data.transforms import (
    CenterCrop,
    Compose,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    as_uint8,
)

SIZES = [(40, 30), (31, 57), (90, 28), (27, 80), (20, 20), (17, 33)]


def picture(width: int, height: int, key: int = 0) -> Image.Image:
    random = np.random.default_rng(key)
    coarse = np.kron(random.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3)), np.ones((8, 8, 1)))
    pixels = coarse[:height, :width] + random.integers(-9, 9, (height, width, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


PAIRS = {
    "crop": (RandomResizedCrop(24), "RandomResizedCrop", (24,), {}),
    "crop that never fits": (RandomResizedCrop(24, (2, 3)), "RandomResizedCrop", (24, (2, 3)), {}),
    "flip": (RandomHorizontalFlip(), "RandomHorizontalFlip", (), {}),
    "resize": (Resize(32), "Resize", (32,), {}),
    "centre": (CenterCrop(28), "CenterCrop", (28,), {}),
    "padded": (RandomCrop(21, 4), "RandomCrop", (21,), {"padding": 4}),
    "augment": (RandAugment(), "RandAugment", (), {}),
    "strong": (RandAugment(3, 30), "RandAugment", (3, 30), {}),
    "weak": (RandAugment(4, 0), "RandAugment", (4, 0), {}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_transforms_equal_those_of_torchvision(name: str) -> None:
    ours, kind, arguments, keywords = PAIRS[name]
    theirs = getattr(library("torchvision.transforms.v2"), kind)(*arguments, **keywords)
    for seed in range(30):
        image = picture(*SIZES[seed % len(SIZES)], key=seed)
        torch.manual_seed(seed)
        wanted, after = theirs(image), torch.rand(())
        torch.manual_seed(seed)
        found = ours(image)
        assert found.size == wanted.size
        assert np.array_equal(np.asarray(found), np.asarray(wanted)), (seed, ours)
        assert torch.equal(torch.rand(()), after)  # as many draws


def test_crops_do_what_they_say() -> None:
    image = Image.fromarray(np.arange(35, dtype=np.uint8).reshape(5, 7))
    assert np.array_equal(CenterCrop(3)(image), np.arange(35).reshape(5, 7)[1:4, 2:5])
    small = np.asarray(CenterCrop(9)(image))
    assert small.shape == (9, 9)
    assert np.array_equal(small[2:7, 1:8], image)
    assert small.sum() == np.arange(35).sum()
    seen = {RandomCrop(6, 1)(image).getpixel((2, 2)) for _ in range(200)}
    assert seen == {7 * y + x for y in (1, 2) for x in (1, 2, 3, 4)}
    crop = RandomResizedCrop(4, scale=(1, 1), ratio=(1.4, 1.4))
    assert crop.draw(7, 5) == (0, 0, 7, 5)
    for _ in range(100):
        left, top, width, height = RandomResizedCrop(4).draw(50, 40)
        assert 0 <= left <= 50 - width
        assert 0 <= top <= 40 - height
        assert 0.07 <= width * height / 2000 <= 1
        assert 0.7 <= width / height <= 1.4
    with refused("a crop of 9 pixels", "7x5", "1 pixels of padding"):
        RandomCrop(9, 1)(image)


def test_every_operation_of_rand_augment_is_used() -> None:
    image, seen = picture(24, 24), set()
    for seed in range(150):
        torch.manual_seed(seed)
        seen.add(np.asarray(RandAugment(1, 20)(image)).tobytes())
    assert 20 <= len(seen) <= 23  # 14 operations, 8 of them in two directions; posterize and identity have one result


def test_pipelines_by_name() -> None:
    image = picture(300, 280)
    torch.manual_seed(0)
    wanted = RandAugment()(RandomHorizontalFlip()(RandomResizedCrop(24)(image)))
    torch.manual_seed(0)
    assert np.array_equal(image_transform(24, "randaugment")(image), wanted)
    centre = CenterCrop(224)(Resize(256)(image))
    assert np.array_equal(image_transform(224)(image), centre)
    assert image_transform(224, resize=240)(image).size == (224, 224)
    assert "RandomResizedCrop(24" in repr(image_transform(24, "crop-flip"))
    with refused("augment is 'flip'", "crop-flip"):
        image_transform(24, "flip")  # type: ignore[arg-type]
    with refused("backend is 'cv2'", "torchvision"):
        image_transform(24, "none", "cv2")  # type: ignore[arg-type]
    for wrong in ({"operations": -1}, {"magnitude": 31}):
        with refused("RandAugment has", "give 0"):
            RandAugment(**wrong)


@pytest.mark.parametrize("augment", ["none", "crop-flip", "randaugment"])
def test_the_torchvision_backend_has_the_same_random_numbers(augment: str) -> None:
    library("torchvision.transforms.v2")
    differences = []
    for seed in range(12):
        image = picture(*SIZES[seed % len(SIZES)], key=seed)
        found = []
        for backend in ("pillow", "torchvision"):
            torch.manual_seed(seed)
            found.append(image_transform(16, augment, backend)(image))
        wanted = torch.from_numpy(np.asarray(found[0]).transpose(2, 0, 1).copy())
        assert found[1].dtype == torch.uint8
        assert found[1].shape == wanted.shape
        differences.append((found[1].float() - wanted.float()).abs().mean())
    assert float(torch.stack(differences).median()) < 2  # of 255: they round differently


def test_images_are_stacked() -> None:
    images = [picture(6, 5, key) for key in range(3)]
    wanted = torch.stack([torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy()) for image in images])
    assert torch.equal(as_uint8(images), wanted)
    assert as_uint8(images).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(as_uint8(list(wanted)), wanted)
    grey = [image.convert("L") for image in images]
    assert as_uint8(grey).shape == (3, 1, 5, 6)
    with refused("(5, 6, 'RGB')", "(6, 5, 'RGB')"):
        as_uint8([images[0], images[1].transpose(Image.Transpose.ROTATE_90)])
    assert repr(Compose(CenterCrop(3), Resize(2), RandomCrop(2), RandAugment())).count(",") == 5
