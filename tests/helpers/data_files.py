"""Helpers for tests of data: small image data, and checks of error messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from petra.data import ImageData

Array = NDArray[Any]


@contextmanager
def refused(*words: object, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Expect an error whose message is one line with all these words in it."""
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for word in words:
        assert str(word) in message


def numbered(count: int, *, test: int = 3, crop_padding: int = 0, flip: bool = False) -> ImageData:
    """Images 2×3×4 whose pixels and label identify the sample; no pixel is zero."""
    step = torch.arange(24, dtype=torch.float32).view(2, 3, 4) / 100

    def images(n: int) -> Tensor:
        return 1 + torch.arange(n).view(-1, 1, 1, 1) + step

    labels = torch.arange(max(count, test))
    return ImageData(
        name="numbered",
        train_images=images(count),
        train_labels=labels[:count],
        test_images=images(test),
        test_labels=labels[:test],
        num_classes=len(labels),
        mean=(0.0, 0.0),
        std=(1.0, 1.0),
        crop_padding=crop_padding,
        flip=flip,
    )


def equal(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in pairs)
