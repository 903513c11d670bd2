"""Codecs, which round the float32 tensors of a message and encode them for sending.

`bf16` casts. `int8` and `fp8` divide each block of 64 consecutive values by a scale, so that the largest magnitude of
the block becomes the largest number of the type. With the float32 scales, a value takes 1.0625 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from petra.formatting import unknown

T = TypeVar("T", Tensor, Tensor | None)

BLOCK = 64
"""The number of values that share a scale."""


@dataclass(frozen=True)
class Codec:
    """Rounds float32 tensors and encodes them for sending. Other tensors, and None, are not changed."""

    name: str
    """The name that `--comm-dtype` takes."""
    dtype: torch.dtype = torch.float32
    """The type of the values that are sent."""
    max_value: float | None = None
    """The largest number of the type, if blocks of values have a scale; None if values are cast."""

    @property
    def exact(self) -> bool:
        """True if nothing is rounded."""
        return self.dtype == torch.float32

    def pack(self, tensors: tuple[T, ...]) -> tuple[T, ...]:
        """Round tensors for a mailbox: cast them, or, if blocks have scales, round them and keep them in float32.

        Args:
            tensors: Streams or gradients, in the memory layout of messages.

        Returns:
            The rounded tensors, in the same layout. If they cross ranks, they arrive with the same bits.
        """
        if self.exact:
            return tensors
        return tuple(self._round(t) if t is not None and _is_float32(t) else t for t in tensors)

    def unpack(self, tensors: tuple[T, ...]) -> tuple[T, ...]:
        """Return the tensors that a stage computes with.

        Args:
            tensors: The tensors that `pack` returned.

        Returns:
            The tensors in float32.
        """
        if self.exact or self.max_value is not None:
            return tensors
        return tuple(t if t is None or t.dtype != self.dtype else t.float() for t in tensors)

    def encode(self, tensors: tuple[T, ...]) -> tuple[T, ...]:
        """Return the tensors to send to another rank.

        Args:
            tensors: Streams or gradients, in the memory layout of messages.

        Returns:
            The rounded tensors; where blocks have scales, a vector of bytes for each of them.
        """
        if self.max_value is None:
            return self.pack(tensors)
        return tuple(self._bytes(t) if t is not None and _is_float32(t) else t for t in tensors)

    def encoded_template(self, template: Tensor | None) -> Tensor | None:
        """Return the shape and dtype in which a tensor is sent.

        Args:
            template: A tensor with the shape and dtype that `pack` returns.

        Returns:
            A tensor without values.
        """
        if self.max_value is None or template is None or not _is_float32(template):
            return template
        count = template.numel()
        return torch.empty(4 * _blocks(count) + count, dtype=torch.uint8, device="meta")

    def decode(self, tensor: Tensor | None, template: Tensor | None, channels_last: bool) -> Tensor | None:
        """Decode a received tensor; the result equals that of `pack`.

        Args:
            tensor: A tensor that `encode` returned.
            template: A tensor with the shape and dtype that `pack` returns.
            channels_last: True if images have their channels last.

        Returns:
            The tensor, in the memory layout of messages.
        """
        if self.max_value is None or tensor is None or template is None or not _is_float32(template):
            return tensor
        return self._from_bytes(tensor, template.shape, channels_last)

    def _round(self, tensor: Tensor) -> Tensor:
        if self.max_value is None:
            return tensor.to(self.dtype)
        return self._restored(*self._quantized(tensor), tensor.shape, _channels_last(tensor))

    def _quantized(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return values of the type in blocks, and the scale of each block."""
        assert self.max_value is not None
        flat = (tensor.permute(0, 2, 3, 1) if _channels_last(tensor) else tensor).detach().reshape(-1)
        count = _blocks(flat.numel())
        blocks = pad(flat, (0, count * BLOCK - flat.numel())).view(count, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True) / self.max_value
        # A block with a value that is not finite arrives as NaN, so that a training that diverges is detected.
        scales = torch.where(scales.isfinite(), scales, torch.nan)
        values = blocks / torch.where(scales > 0, scales, 1)
        if not self.dtype.is_floating_point:
            values = values.round_().nan_to_num_(0.0)
        # For tiny values, the scale itself is rounded, so a quotient may exceed the largest number of the type.
        return values.clamp_(-self.max_value, self.max_value).to(self.dtype), scales

    def _restored(self, values: Tensor, scales: Tensor, shape: torch.Size, last: bool) -> Tensor:
        flat = (values.float() * scales).view(-1)[: shape.numel()]
        if not last:
            return flat.view(shape)
        batch, channels, height, width = shape
        return flat.view(batch, height, width, channels).permute(0, 3, 1, 2)

    def _bytes(self, tensor: Tensor) -> Tensor:
        values, scales = self._quantized(tensor)
        # The scales come first, because their address has to be a multiple of 4.
        return torch.cat([scales.view(-1).view(torch.uint8), values.view(torch.uint8).view(-1)[: tensor.numel()]])

    def _from_bytes(self, encoded: Tensor, shape: torch.Size, last: bool) -> Tensor:
        count = _blocks(shape.numel())
        scales, values = encoded[: 4 * count].view(torch.float32), encoded[4 * count :].view(self.dtype)
        blocks = pad(values.float(), (0, count * BLOCK - shape.numel())).view(count, BLOCK)
        return self._restored(blocks, scales.view(count, 1), shape, last and len(shape) == 4)


def _is_float32(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32


def _channels_last(tensor: Tensor) -> bool:
    """Return whether the strides are those of channels-last images, also where both layouts have the same memory."""
    if tensor.ndim != 4:
        return False
    _, channels, height, width = tensor.shape
    return tensor.stride() == (height * width * channels, 1, width * channels, channels)


def _blocks(values: int) -> int:
    return -(-values // BLOCK)


FLOAT32 = Codec("float32")
BF16 = Codec("bf16", torch.bfloat16)
INT8 = Codec("int8", torch.int8, 127.0)
_FP8 = getattr(torch, "float8_e4m3fn", None)

CODECS = {codec.name: codec for codec in (FLOAT32, BF16, INT8)}
"""The codecs by name; `fp8` where PyTorch has the type."""
if _FP8 is not None:
    CODECS["fp8"] = Codec("fp8", _FP8, 448.0)


def find_codec(given: str | torch.dtype | None) -> Codec:
    """Return a codec.

    Args:
        given: A name; a floating-point type that values are cast to; None for float32.

    Returns:
        The codec.

    Raises:
        ValueError: If there is none.
    """
    if isinstance(given, str):
        if given == "fp8" and given not in CODECS:
            raise ValueError("this PyTorch has no torch.float8_e4m3fn for fp8: give int8 or bf16, or update PyTorch")
        if given not in CODECS:
            raise unknown("codec", given, CODECS)
        return CODECS[given]
    if given is None:
        return FLOAT32
    if not (isinstance(given, torch.dtype) and given.is_floating_point and given.itemsize > 1):
        raise ValueError(
            f"comm_dtype is {given!r}: give a name like 'int8', a dtype like torch.bfloat16, or None for float32"
        )
    known = [codec for codec in CODECS.values() if codec.dtype == given]
    return known[0] if known else Codec(str(given), given)


def find_codecs(given: str | torch.dtype | None) -> tuple[Codec, Codec]:
    """Return the codecs of streams and of gradients.

    Args:
        given: An argument of `find_codec`, for both; or a text such as `"streams=bf16,gradients=int8"`. A part that is
            left out is float32.

    Returns:
        Both codecs.

    Raises:
        ValueError: If there is no such codec, or the text cannot be parsed.
    """
    if not isinstance(given, str) or "=" not in given:
        codec = find_codec(given)
        return codec, codec
    found: dict[str, Codec] = {}
    for part in given.split(","):
        kind, _, name = part.partition("=")
        if kind.strip() not in ("streams", "gradients") or kind.strip() in found:
            raise ValueError(f"comm_dtype is {given!r}: write it like streams=bf16,gradients=int8")
        found[kind.strip()] = find_codec(name.strip())
    return found.get("streams", FLOAT32), found.get("gradients", FLOAT32)
