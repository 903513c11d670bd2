"""Copies batches to the device one ahead, and normalises and mixes them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from petra.data.mixing import Mixing

Item = TypeVar("Item")


def read_ahead(
    items: Iterator[Item], device: torch.device, finish: Callable[[Item], Item] | None = None
) -> Iterator[Item]:
    """Copy items to a device.

    On a GPU, an item is copied and finished on another CUDA stream while the previous one is in use. Copies from pinned
    memory do not make the host wait.

    Args:
        items: Any nested structures with tensors.
        device: The device.
        finish: A function of an item on the device.

    Returns:
        An iterator over the finished items.

    """
    finish = finish if finish is not None else _unchanged
    if device.type != "cuda":
        return (finish(_to_device(item, device)) for item in items)
    return _read_ahead_on_gpu(items, device, finish)


def _read_ahead_on_gpu(items: Iterator[Item], device: torch.device, finish: Callable[[Item], Item]) -> Iterator[Item]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def load() -> list[Item]:
        for item in items:
            with torch.cuda.stream(stream):
                return [finish(_to_device(_pin(item), device))]
        return []

    ahead = load()
    while ahead:
        [item] = ahead
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for leaf in tree_leaves(item):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                leaf.record_stream(current)  # its memory is not reused before this stream has finished with it
        ahead = load()
        yield item


def _to_device(item: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), item)


def _pin(item: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t if t.is_pinned() or t.is_cuda else t.pin_memory(), item)


def _unchanged(item: Item) -> Item:
    return item


class Normalise:
    """Converts pixels to floating point and normalises every channel, in one rounding.

    Args:
        mean: Mean of each channel, of pixel values scaled to [0, 1].
        std: Standard deviation of each channel.
        device: Device of the images.
        dtype: Type of the results.
        max_value: The pixel value that means 1.

    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        dtype: torch.dtype,
        max_value: float = 255.0,
    ) -> None:
        # (x / max - mean) / std as x * scale + shift. The result is rounded to half precision only once, at the end.
        self._dtype, self._compute_dtype = dtype, torch.float64 if dtype == torch.float64 else torch.float32
        self._scale = self._per_channel([1 / (max_value * s) for s in std], device)
        self._shift = self._per_channel([-m / s for m, s in zip(mean, std, strict=True)], device)

    def __call__(self, images: Tensor) -> Tensor:
        return images.to(self._compute_dtype).mul_(self._scale).add_(self._shift).to(self._dtype)

    def _per_channel(self, values: list[float], device: torch.device) -> Tensor:
        return torch.tensor(values, dtype=self._compute_dtype, device=device).view(-1, 1, 1)


@dataclass(frozen=True)
class Finish:
    """The steps that turn samples into a batch on the device."""

    normalise: Normalise | None
    """Converts and normalises uint8 images."""
    mixing: Mixing | None
    """Mixes images in pairs."""
    channels_last: bool
    """The memory format of images."""
    seed: int
    """Seed of the mixing."""
    shard: tuple[int, int]
    """`(r, R)` for the r-th of R parts."""

    def __call__(self, inputs: Any, targets: Any, size: int, epoch: int, index: int) -> tuple[Any, Any]:
        """Finish this shard's part of a batch of `size` samples."""
        if self.normalise is not None:
            inputs = self.normalise(inputs)
        if self.mixing is not None:
            inputs, targets = self.mixing.part(inputs, targets, size, self.shard, self.seed, epoch, index)
        if isinstance(inputs, Tensor) and inputs.ndim == 4:
            # Pillow images arrive with their channels last.
            wanted = torch.channels_last if self.channels_last else torch.contiguous_format
            inputs = inputs.contiguous(memory_format=wanted)
        return inputs, targets
