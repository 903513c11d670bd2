"""The transforms of training and test images, by name, with Pillow or torchvision."""

from __future__ import annotations

from typing import Any, Literal, get_args

from petra.data.rand_augment import RandAugment
from petra.data.transforms import CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop, Resize, Transform

Augmentation = Literal["none", "crop-flip", "randaugment"]
"""`"crop-flip"`: a random crop that is resized, and a flip. `"randaugment"`: the same, and RandAugment."""
Backend = Literal["pillow", "torchvision"]
AUGMENTATIONS: tuple[Augmentation, ...] = get_args(Augmentation)
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def image_transform(
    size: int, augment: Augmentation = "none", backend: Backend = "pillow", resize: int | None = None
) -> Transform:
    """Return the transform of an image to a square.

    Args:
        size: Side of the square in pixels.
        augment: Random changes of training images. Without them, the image is resized and cropped in the centre.
        backend: `"pillow"`, or `"torchvision"` for the tensor functions of `torchvision.transforms.v2`. They have the
            same random numbers, but do not round in the same way.
        resize: Shorter side of the image before the crop in the centre, by default 8/7 of `size`: 256 for 224.

    Returns:
        A function of a Pillow image that returns a Pillow image or a uint8 tensor.

    Raises:
        ValueError: If a name is unknown, or torchvision does not work.

    """
    if augment not in AUGMENTATIONS:
        raise ValueError(f"augment is {augment!r}: give one of {', '.join(AUGMENTATIONS)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: give one of {', '.join(BACKENDS)}")
    resize = round(size * 8 / 7) if resize is None else resize
    if backend == "torchvision":
        v2 = _torchvision()
        steps = [v2.PILToTensor()]
        if augment == "none":
            steps += [v2.Resize(resize, antialias=True), v2.CenterCrop(size)]
        else:
            steps += [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
            steps += [v2.RandAugment()] if augment == "randaugment" else []
        return Compose(*steps)
    if augment == "none":
        return Compose(Resize(resize), CenterCrop(size))
    crop = RandomResizedCrop(size), RandomHorizontalFlip()
    return Compose(*crop, RandAugment()) if augment == "randaugment" else Compose(*crop)


def _torchvision() -> Any:
    try:
        from torchvision.transforms import v2
    except (ImportError, RuntimeError) as error:  # a RuntimeError if it was built for another PyTorch
        raise ValueError(
            "the backend 'torchvision' needs torchvision in the version for this PyTorch: pip install torchvision, or "
            "use the backend 'pillow'"
        ) from error
    return v2
