"""Decodes images (PNG, JPEG, …) into one uint8 tensor, with a few threads."""

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

Source = tuple[str, bytes | Path]  # the image's name in messages, and its encoded bytes or its file

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
                raise ValueError(
                    f"{source[0]} is {_size(image)}, but {sources[0][0]} is {_size(first)}: "
                    "resize all images to the same size first"
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
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("decoding images needs pillow: pip install 'petra[images]'") from error
    name, content = source
    try:
        with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
            mode = image.mode
            pixels = None if mode.startswith(("I", "F")) else np.asarray(image.convert("RGB"))
    except Exception as error:  # a malformed image can raise any exception
        raise ValueError(f"{name} is not a readable image ({type(error).__name__}): replace it") from error
    if pixels is None:
        raise ValueError(f"{name} has more than 8 bits per channel (mode {mode}): convert it to 8 bits first")
    return pixels.transpose(2, 0, 1), mode in ("1", "L", "LA")


def _size(image: NDArray[np.uint8]) -> str:
    return f"{image.shape[2]}x{image.shape[1]}"
