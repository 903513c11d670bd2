"""Image data sets of any size, whose images are decoded when they are needed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra.data.dataset import SplitName
from petra.data.device_batches import Normalise
from petra.data.image_pipeline import Augmentation, Backend, image_transform
from petra.data.image_samples import ImageSamples
from petra.data.mixing import Mixing
from petra.data.sample_batches import SampleBatches
from petra.data.sample_reader import SampleReader, keep_random_state
from petra.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Transform

DEFAULT_IMAGE_SIZE = 224


@dataclass(frozen=True, eq=False)
class ImageFileData:
    """Labelled images of different sizes that are decoded, cropped and resized when they are needed.

    Training images are random crops, test images are resized to 8/7 of the size and cropped in the centre, as is usual
    for ImageNet.

    Raises:
        ValueError: If the fields do not fit together.

    """

    name: str
    """The name that messages use."""
    train: ImageSamples
    """Training images."""
    test: ImageSamples
    """Test images."""
    num_classes: int
    """Number of classes. Labels are 0 to `num_classes - 1`."""
    image_size: int = DEFAULT_IMAGE_SIZE
    """Height and width of the images that a network gets."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Mean of each channel, of pixel values scaled to [0, 1]."""
    std: tuple[float, ...] = IMAGENET_STD
    """Standard deviation of each channel, of pixel values scaled to [0, 1]."""
    class_names: tuple[str, ...] = ()
    """Name of each class; empty if the source has no names."""

    def __post_init__(self) -> None:
        for split, samples in (("train", self.train), ("test", self.test)):
            if not len(samples):
                raise ValueError(f"{self.name}: {split} split is empty: give at least one image")
            low, high = int(samples.labels.min()), int(samples.labels.max())
            if low < 0 or high >= self.num_classes:
                raise ValueError(
                    f"{self.name}: {split} split: label {low if low < 0 else high} is outside "
                    f"0..{self.num_classes - 1}: use a labelled split, or correct the number of classes"
                )
        if self.image_size < 1:
            raise ValueError(f"--image-size is {self.image_size}: give 1 or more")

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that a network gets."""
        return len(self.mean), self.image_size, self.image_size

    @property
    def unit(self) -> str:
        return "images"

    @property
    def arguments(self) -> dict[str, Any]:
        return {"num_classes": self.num_classes, "in_channels": len(self.mean), "image_size": self.image_size}

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return ()

    @property
    def content_hash(self) -> str:
        """Hash of names, sizes and labels of all images, in hexadecimal."""
        return hashlib.sha256(f"{self.train.digest()} {self.test.digest()}".encode()).hexdigest()

    def split(self, name: SplitName, *, augment: bool, device: torch.device, dtype: torch.dtype) -> ImageFileSplit:
        """Return one split, whose images are decoded in this process. `batches` decodes them in worker processes.

        Args:
            name: `"train"` or `"test"`.
            augment: Randomly crop and flip images.
            device: Device of the batches.
            dtype: Floating-point type of images.

        Returns:
            The split.

        """
        samples = self.train if name == "train" else self.test
        transform = image_transform(self.image_size, "crop-flip" if augment else "none")
        return ImageFileSplit(samples, transform, Normalise(self.mean, self.std, device, dtype), device)

    def batches(
        self,
        split: SplitName,
        batch_size: int,
        *,
        seed: int = 0,
        augment: Augmentation | None = None,
        backend: Backend = "pillow",
        mixing: Mixing | None = None,
        drop_last: bool = False,
        workers: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        shard: tuple[int, int] = (0, 1),
        channels_last: bool = False,
        inputs: bool = True,
    ) -> SampleBatches:
        """Return the batches of a split, decoded in worker processes.

        Args:
            split: `"train"` or `"test"`.
            batch_size: Samples per batch, over all shards together.
            seed: Seed of order, augmentation and mixing.
            augment: Augmentation of the training split, by default `"crop-flip"`.
            backend: Library that transforms images, `"pillow"` or `"torchvision"`.
            mixing: Mix the images of each training batch.
            drop_last: Omit the last batch of an epoch if it has fewer than `batch_size` samples.
            workers: Number of worker processes; 0 to decode in this process.
            device: Device of the batches.
            dtype: Floating-point type of images.
            shard: `(r, R)` to get the r-th of R parts of every batch.
            channels_last: Store images in PyTorch's channels-last memory format.
            inputs: Decode images. Otherwise, images are zeros, for a rank that needs only the targets.

        Returns:
            The batches.

        """
        train = split == "train"
        augment = ("crop-flip" if augment is None else augment) if train else "none"
        samples = self.train if train else self.test
        transform: Transform = image_transform(self.image_size, augment, backend)
        return SampleBatches(
            samples if inputs else _Labels(samples.labels),
            batch_size,
            transform=transform if inputs else None,
            collate=None if inputs else _Blank(self.input_shape, dtype),
            normalise=(self.mean, self.std) if inputs else None,
            mixing=mixing if train else None,
            seed=seed,
            shuffle=train,
            drop_last=drop_last,
            workers=workers if inputs else 0,
            device=device,
            dtype=dtype,
            shard=shard,
            channels_last=channels_last,
        )


class ImageFileSplit:
    """One split of `ImageFileData`, with the same samples as `ImageFileData.batches`."""

    def __init__(self, samples: ImageSamples, transform: Transform, normalise: Normalise, device: torch.device) -> None:
        self._samples, self._transform, self._normalise, self.device = samples, transform, normalise, device

    def __len__(self) -> int:
        return len(self._samples)

    def draw(self, count: int, seed: int, epoch: int, batch: int) -> Tensor | None:
        return torch.tensor([[seed], [epoch]], device="cpu").expand(2, count)

    def take(self, index: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
        assert drawn is not None
        samples = []
        with keep_random_state():
            for i, (seed, epoch) in zip(index.tolist(), drawn.T.tolist(), strict=True):
                reader = SampleReader(self._transform, None, None, seed)
                reader.seed_sample(epoch, i)
                samples.append(reader.read(self._samples[i]))
        images, labels = reader.batch(samples)
        return self._normalise(images.to(self.device)).contiguous(), labels.to(self.device)


@dataclass(frozen=True)
class _Labels:
    """Samples without images."""

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[None, int]:
        return None, int(self.labels[index])


@dataclass(frozen=True)
class _Blank:
    """Makes images of zeros."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, samples: list[None]) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device="cpu").expand(len(samples), *self.shape)
