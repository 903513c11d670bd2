"""RandAugment with Pillow: a few random changes of shape and colour."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from PIL.Image import Image

MAGNITUDES = 31
_Apply = Callable[["Image", float], "Image"]


class RandAugment:
    """Applies random operations to an image (Cubuk et al., 2020).

    The operations are identity, shear, translation and rotation, brightness, colour, contrast, sharpness, posterize,
    solarize, autocontrast and equalize. Pixels from outside the image are black.

    Args:
        operations: Number of operations.
        magnitude: Their strength, from 0 to 30.

    Raises:
        ValueError: If a number is out of range.

    """

    def __init__(self, operations: int = 2, magnitude: int = 9) -> None:
        if operations < 0:
            raise ValueError(f"RandAugment has {operations} operations: give 0 or more")
        if not 0 <= magnitude < MAGNITUDES:
            raise ValueError(f"RandAugment has magnitude {magnitude}: give 0 to {MAGNITUDES - 1}")
        self.operations, self.magnitude = operations, magnitude

    def __call__(self, image: Image) -> Image:
        for _ in range(self.operations):
            name, largest, signed = _OPERATIONS[int(torch.randint(len(_OPERATIONS), ()))]
            strength = 0.0
            if largest is not None:
                strength = self._strength(name, largest, image)
                if signed and torch.rand(()) <= 0.5:
                    strength = -strength
            image = _APPLY[name](image, strength)
        return image

    def _strength(self, name: str, largest: float, image: Image) -> float:
        if name == "posterize":  # bits that are kept, from 8 to 4
            return 8 - round(self.magnitude / ((MAGNITUDES - 1) / 4))
        if name == "solarize":  # the threshold falls
            return float(torch.linspace(largest, 0.0, MAGNITUDES)[self.magnitude])
        if name.startswith("translate"):
            largest *= image.width if name == "translate_x" else image.height
        return float(torch.linspace(0.0, largest, MAGNITUDES)[self.magnitude])

    def __repr__(self) -> str:
        return f"RandAugment({self.operations}, {self.magnitude})"


_OPERATIONS: tuple[tuple[str, float | None, bool], ...] = (
    ("identity", None, False),
    ("shear_x", 0.3, True),
    ("shear_y", 0.3, True),
    ("translate_x", 150 / 331, True),
    ("translate_y", 150 / 331, True),
    ("rotate", 30.0, True),
    ("brightness", 0.9, True),
    ("color", 0.9, True),
    ("contrast", 0.9, True),
    ("sharpness", 0.9, True),
    ("posterize", 4.0, False),
    ("solarize", 1.0, False),
    ("autocontrast", None, False),
    ("equalize", None, False),
)
"""Name, largest strength, and whether the strength may be negative."""


def _affine(image: Image, a: float, b: float, c: float, d: float, e: float, f: float) -> Image:
    """The pixel at (x, y) comes from (a·x + b·y + c, d·x + e·y + f)."""
    from PIL.Image import Resampling
    from PIL.Image import Transform as Method

    return image.transform(image.size, Method.AFFINE, (a, b, c, d, e, f), Resampling.NEAREST)


def _rotate(image: Image, degrees: float) -> Image:
    from PIL.Image import Resampling

    return image.rotate(degrees, Resampling.NEAREST)


def _enhance(kind: str) -> _Apply:
    def apply(image: Image, strength: float) -> Image:
        from PIL import ImageEnhance

        enhanced: Image = getattr(ImageEnhance, kind)(image).enhance(1.0 + strength)
        return enhanced

    return apply


def _posterize(image: Image, bits: float) -> Image:
    from PIL import ImageOps

    return ImageOps.posterize(image, int(bits))


def _solarize(image: Image, threshold: float) -> Image:
    from PIL import ImageOps

    return ImageOps.solarize(image, 255.0 * threshold)  # type: ignore[arg-type]  # compared with pixels


def _autocontrast(image: Image, _: float) -> Image:
    from PIL import ImageOps

    return ImageOps.autocontrast(image)


def _equalize(image: Image, _: float) -> Image:
    from PIL import ImageOps

    return ImageOps.equalize(image)


_APPLY: dict[str, _Apply] = {
    "identity": lambda image, _: image,
    "shear_x": lambda image, strength: _affine(image, 1.0, strength, 0.0, 0.0, 1.0, 0.0),
    "shear_y": lambda image, strength: _affine(image, 1.0, 0.0, 0.0, strength, 1.0, 0.0),
    "translate_x": lambda image, strength: _affine(image, 1.0, 0.0, -int(strength), 0.0, 1.0, 0.0),
    "translate_y": lambda image, strength: _affine(image, 1.0, 0.0, 0.0, 0.0, 1.0, -int(strength)),
    "rotate": _rotate,
    "brightness": _enhance("Brightness"),
    "color": _enhance("Color"),
    "contrast": _enhance("Contrast"),
    "sharpness": _enhance("Sharpness"),
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
}
