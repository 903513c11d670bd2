"""What hierarchical transformers share: residual functions, the plain block, fusing, the head.

Streams are feature maps of shape (batch, height, width, channels).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

FuseKind = Literal["mean", "linear", "mlp"]


class DropPath(nn.Module):
    """Stochastic depth: leaves a residual function out for some of the samples."""

    keep: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.active = rate > 0
        # A tensor, so that blocks which differ in their rates alone are compiled once.
        self.register_buffer("keep", torch.tensor(1 - rate), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.active):
            return x
        drawn = torch.rand(len(x), *(1 for _ in x.shape[1:]), device=x.device)
        return x * ((drawn < self.keep).to(x.dtype) / self.keep)


class MLP(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, inputs: int, hidden: int, outputs: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, hidden)
        self.down = nn.Linear(hidden, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(functional.gelu(self.up(x)))
        return self.dropout(self.down(x))  # type: ignore[no-any-return]


class Branch(nn.Module):
    """A residual function: norm, body, stochastic depth."""

    def __init__(self, norm: nn.Module, body: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.norm = norm
        self.body = body
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop_path(self.body(self.norm(x)))  # type: ignore[no-any-return]


class PlainBlock(nn.Module):
    """The plain twin of a reversible block: x ← x + f(x), x ← x + g(x)."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        return x + self.g(x)  # type: ignore[no-any-return]


class Fusion(nn.Module):
    """Makes one stream of two where the resolution changes (PaReprop, Section 3.4 and Figure 4).

    Their mean, or a linear layer or MLP on their concatenation. A single stream is passed on.
    """

    def __init__(self, width: int, kind: FuseKind) -> None:
        super().__init__()
        self.project: nn.Module | None = None
        if kind == "linear":
            self.project = nn.Linear(2 * width, width)
        elif kind == "mlp":
            self.project = MLP(2 * width, 2 * width, width)

    def forward(self, *streams: Tensor) -> Tensor:
        if self.project is None:
            return mean(streams)
        return self.project(torch.cat(streams, dim=-1))  # type: ignore[no-any-return]

    def begin_as_mean(self) -> None:
        """Set a linear fusion to the mean of the streams."""
        if isinstance(self.project, nn.Linear):
            half = torch.eye(self.project.out_features) / 2
            with torch.no_grad():
                self.project.weight.copy_(torch.cat([half, half], dim=1))


class MapHead(nn.Module):
    """The last layer: mean of the streams, norm, average over the map, linear classifier."""

    def __init__(self, width: int, num_classes: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, *streams: Tensor) -> Tensor:
        return self.fc(self.norm(mean(streams)).mean(dim=(1, 2)))  # type: ignore[no-any-return]


def mean(streams: tuple[Tensor, ...]) -> Tensor:
    """The mean of two streams, or the only one."""
    return streams[0] if len(streams) == 1 else (streams[0] + streams[1]) * 0.5


def initialise(network: nn.Module) -> None:
    """Linear weights drawn, biases zero, and fusing begins as the mean."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            draw(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in network.modules():
        if isinstance(module, Fusion):
            module.begin_as_mean()


def draw(weight: Tensor) -> None:
    """Fill with a normal distribution of deviation 0.02; on "meta" there is nothing to fill."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=0.02)


def drop_path_rates(blocks: int, last: float) -> Iterator[float]:
    """Rates of stochastic depth that grow evenly from 0 in the first block to ``last``."""
    return (last * i / max(blocks - 1, 1) for i in range(blocks))


def check_image(x: Tensor, image_size: int) -> None:
    """Refuse images of another size than the network was built for: windows and positions depend on it."""
    if x.shape[-2:] != (image_size, image_size):
        raise ValueError(
            f"images are {x.shape[-2]}×{x.shape[-1]}, but the network was built for {image_size}×{image_size}: "
            "create it with another image_size, or resize the images"
        )


def check_hierarchy(
    *,
    width: int,
    depths: tuple[int, ...],
    heads: tuple[int, ...],
    image_size: int,
    patch: int,
    mlp_ratio: float,
    num_classes: int,
    in_channels: int,
    dropout: float,
    drop_path: float,
    fuse: str,
) -> None:
    """Refuse sizes that make no network."""
    sizes = {"width": width, "image_size": image_size, "patch": patch, "num_classes": num_classes}
    for name, size in (sizes | {"in_channels": in_channels}).items():
        if size < 1:
            raise ValueError(f"{name} is {size}: give 1 or more")
    if not depths or min(depths) < 1:
        raise ValueError(f"depths is {depths}: give the number of blocks of each group, all 1 or more")
    if len(heads) != len(depths):
        raise ValueError(f"heads is {heads}, but there are {len(depths)} groups: give one number for each")
    for group, number in enumerate(heads):
        if number < 1 or (width << group) % number:
            raise ValueError(
                f"group {group + 1} has {width << group} channels, which {number} heads cannot share: "
                "give each group a number of heads that divides its channels"
            )
    if image_size % patch:
        raise ValueError(f"image_size {image_size} is not a multiple of patch {patch}: choose a patch that divides it")
    if round(width * mlp_ratio) < 1:
        raise ValueError(f"mlp_ratio {mlp_ratio} leaves nothing of width {width}: give about 4")
    for name, rate in (("dropout", dropout), ("drop_path", drop_path)):
        if not 0 <= rate < 1:
            raise ValueError(f"{name} is {rate}: give a rate from 0 to less than 1")
    if fuse not in get_args(FuseKind):
        raise ValueError(f"fuse is {fuse!r}: choose one of {', '.join(get_args(FuseKind))}")
