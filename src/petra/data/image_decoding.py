"""Decodes images (PNG, JPEG, …) into one uint8 tensor, with a few threads."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

if TYPE_CHECKING:
    from PIL.Image import Image

Source = tuple[str, bytes | Path]  # the image's name in messages, and its encoded bytes or its file


class DifferentSizes(ValueError):
    """Images that cannot be in one tensor."""


_CHUNK = 256  # images per task, so many that the cost of submitting a task is negligible


def decode(sources: Sequence[Source]) -> Tensor:
    """Decode all images to uint8 NCHW: RGB, or one channel if every image is grey. All must have the same size."""
    first, _ = _decode_one(sources[0])
    pixels = np.empty((len(sources), *first.shape), np.uint8)
    grey = np.empty(len(sources), bool)

    def fill(start: int) -> int:
        chunk = sources[start : start + _CHUNK]
        for i, source in enumerate(chunk, start):
            image, grey[i] = _decode_one(source)
            if image.shape != first.shape:
                raise DifferentSizes(
                    f"{source[0]} is {_size(image)}, but {sources[0][0]} is {_size(first)}: give --image-size"
                )
            pixels[i] = image
        return len(chunk)

    with (
        ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
        tqdm(total=len(sources), desc="decoding", unit="image", disable=None) as bar,  # None: on a terminal only
    ):
        for done in pool.map(fill, range(0, len(sources), _CHUNK)):
            bar.update(done)
    return torch.from_numpy(pixels[:, :1].copy() if grey.all() else pixels)


def _decode_one(source: Source) -> tuple[NDArray[np.uint8], bool]:
    """Return the image as uint8 of shape (3, H, W), and True if it is grey."""
    with _opened(*source) as image:
        grey = image.mode in ("1", "L", "LA")
        pixels = np.asarray(image.convert("RGB"))
    return pixels.transpose(2, 0, 1), grey


def open_image(name: str, content: bytes | Path) -> Image:
    """Decode an image to RGB.

    Args:
        name: Its name in messages.
        content: Its encoded bytes or its file.

    Returns:
        The image.

    Raises:
        ValueError: If it is damaged or has more than 8 bits per channel, or Pillow is not installed.

    """
    with _opened(name, content) as image:
        return image.convert("RGB")


@contextmanager
def _opened(name: str, content: bytes | Path) -> Iterator[Image]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("decoding images needs pillow: pip install 'petra[images]'") from error
    try:
        with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
            mode = image.mode
            if not mode.startswith(("I", "F")):
                yield image
                return
    except Exception as error:  # a malformed image can raise any exception
        raise ValueError(f"{name} is not a readable image ({type(error).__name__}): replace it") from error
    raise ValueError(f"{name} has more than 8 bits per channel (mode {mode}): convert it to 8 bits first")


def _size(image: NDArray[np.uint8]) -> str:
    return f"{image.shape[2]}x{image.shape[1]}"
