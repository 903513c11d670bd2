"""Parts that all transformers share: variants of blocks, stochastic depth, the plain block, initialisation, checks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import isfinite
from numbers import Integral

import torch
from torch import Tensor, nn

RMS_EPSILON = 1e-6
"""Added to the mean square in RMS norms."""


@dataclass(frozen=True)
class BlockStyle:
    """The variant of a transformer block. The defaults are those of GPT-2."""

    norm: str = "layernorm"
    """`layernorm` or `rmsnorm`."""
    mlp: str = "gelu"
    """`gelu` or `swiglu`."""
    rotary: bool = False
    """True if attention rotates queries and keys by their positions."""
    kv_heads: int = 0
    """Heads of keys and values, each shared by a group of query heads; 0 for one per query head."""
    qk_norm: bool = False
    """True if the queries and keys of each head are normalised."""
    bias: bool = True
    """True if linear layers and layer norms have biases."""
    residual_scale: float = 1.0
    """Factor of each residual branch."""


def make_norm(kind: str, width: int, bias: bool = True) -> nn.Module:
    """Build a layer norm or an RMS norm over the channels."""
    return nn.RMSNorm(width, eps=RMS_EPSILON) if kind == "rmsnorm" else nn.LayerNorm(width, bias=bias)


class DropPath(nn.Module):
    """Stochastic depth: sets random samples to zero and scales up the others."""

    keep: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.active = rate > 0
        # A tensor, so that torch.compile compiles blocks that differ only in their rates once.
        self.register_buffer("keep", torch.tensor(1 - rate), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.active):
            return x
        drawn = torch.rand(x.shape[0], *(1 for _ in x.shape[1:]), device=x.device)
        return x * ((drawn < self.keep).to(x.dtype) / self.keep)

    def extra_repr(self) -> str:
        return f"{self.rate}"


class PlainBlock(nn.Module):
    """The plain version of a reversible block: x ← x + f(x), x ← x + g(x)."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def forward(self, x: Tensor, *companions: Tensor) -> tuple[Tensor, ...]:
        x = x + self.f(x, *companions)
        return x + self.g(x, *companions), *companions


def mean_stream(streams: tuple[Tensor, ...]) -> Tensor:
    """The mean of two streams, or the only stream."""
    return streams[0] if len(streams) == 1 else (streams[0] + streams[1]) * 0.5


def truncated_normal_(weight: Tensor, deviation: float = 0.02) -> None:
    """Fill with a normal distribution that is truncated at two deviations. Skips tensors on the meta device."""
    if not weight.is_meta:
        nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)


def drop_path_rates(blocks: int, last: float) -> list[float]:
    """Rates of stochastic depth that grow linearly from 0 in the first block to `last`."""
    return [last * i / max(blocks - 1, 1) for i in range(blocks)]


def check_rates(**rates: float) -> None:
    """Raise `ValueError` for a rate outside [0, 1)."""
    for name, rate in rates.items():
        if not 0 <= rate < 1:
            raise ValueError(f"{name} is {rate}: give a rate from 0 to less than 1")


def hidden_channels(width: int, mlp_ratio: float) -> int:
    """The hidden channels of an MLP; raises `ValueError` if there would be none."""
    if not isfinite(mlp_ratio):
        raise ValueError(f"mlp_ratio is {mlp_ratio}, which is not a finite number: give about 4")
    if (hidden := round(width * mlp_ratio)) < 1:
        raise ValueError(f"mlp_ratio is {mlp_ratio}, so the MLP has no hidden channels at width {width}: give about 4")
    return hidden


def check_sizes(**sizes: int) -> None:
    """Raise `ValueError` for a size that is not a positive integer."""
    for name, size in sizes.items():
        if not isinstance(size, Integral) or size < 1:
            raise ValueError(f"{name} is {size}: give one integer, 1 or more")


def check_choices(**choices: tuple[object, Collection[str]]) -> None:
    """Raise `ValueError` for a value that is not among its choices."""
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"{name} is {value!r}: choose from {', '.join(known)}")


def check_image(x: Tensor, image_size: int) -> None:
    """Raise `ValueError` for images of another size: windows and positions depend on it."""
    if x.shape[-2:] != (image_size, image_size):
        raise ValueError(
            f"images are {x.shape[-2]}×{x.shape[-1]}, but the network was built for {image_size}×{image_size}: "
            "create it with another image_size, or resize the images"
        )
