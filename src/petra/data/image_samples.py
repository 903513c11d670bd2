"""Labelled images that are read and decoded one at a time: from files, from memory, or encoded in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from petra.data.image_decoding import Source, open_image

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageSamples(Protocol):
    """Labelled images by index."""

    @property
    def labels(self) -> Tensor:
        """One int64 label per image."""

    def __len__(self) -> int:
        """Number of images."""

    def __getitem__(self, index: int) -> tuple[Image, int]:
        """Decode an image, and return it with its label."""

    def digest(self) -> str:
        """Return a hash of what identifies the images, without reading all of them."""


class PackedStrings:
    """A sequence of strings in two tensors.

    Worker processes share tensors. Of a list of strings, each would soon have a copy, because Python counts the
    references to a string in the string.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [string.encode("utf-8", "surrogateescape") for string in strings]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._ends = torch.from_numpy(ends)
        self._text = torch.from_numpy(np.frombuffer(b"".join(encoded) or b"\0", np.uint8).copy())

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        start, end = self._ends[index : index + 2].tolist()
        return bytes(self._text[start:end].numpy()).decode("utf-8", "surrogateescape")


class ImageFiles:
    """Images in files.

    Args:
        root: The folder of all files.
        names: The path of each file in it.
        labels: One int64 label per file.

    """

    def __init__(self, root: Path, names: Sequence[str], labels: Tensor) -> None:
        self.root, self.names, self.labels = root, PackedStrings(names), labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        file = self.root / self.names[index]
        return open_image(str(file), file), int(self.labels[index])

    def digest(self) -> str:
        hashed = hashlib.sha256()
        for i, label in enumerate(self.labels.tolist()):
            name = self.names[i]
            size = (self.root / name).stat().st_size
            hashed.update(f"{name}\0{size}\0{label}\n".encode("utf-8", "surrogateescape"))
        return hashed.hexdigest()


class EncodedImages:
    """Encoded images in memory.

    Args:
        sources: Name and bytes of each image.
        labels: One int64 label per image.

    """

    def __init__(self, sources: Sequence[Source], labels: Tensor) -> None:
        self.sources, self.labels = sources, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        return open_image(*self.sources[index]), int(self.labels[index])

    def digest(self) -> str:
        hashed = hashlib.sha256()
        for (_, content), label in zip(self.sources, self.labels.tolist(), strict=True):
            encoded = content if isinstance(content, bytes) else content.read_bytes()
            hashed.update(f"{len(encoded)} {label}\n".encode() + encoded)
        return hashed.hexdigest()


class DecodedImages:
    """Decoded images in memory.

    Args:
        images: The images, uint8 NCHW with 1 or 3 channels.
        labels: One int64 label per image.

    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        from PIL import Image as images

        pixels = self.images[index].permute(1, 2, 0).contiguous().numpy()
        image = images.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        return image, int(self.labels[index])

    def digest(self) -> str:
        hashed = hashlib.sha256(str(tuple(self.images.shape)).encode())
        for tensor in (self.images, self.labels):
            hashed.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return hashed.hexdigest()
