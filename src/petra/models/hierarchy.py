"""What hierarchical transformers share: residual functions, the plain block, fusing, the head.

Streams are feature maps of shape (batch, height, width, channels).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from petra.models.parts import DropPath, check_rates, check_sizes, draw, mean

FuseKind = Literal["mean", "linear", "mlp"]


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
    check_sizes(width=width, image_size=image_size, patch=patch, num_classes=num_classes, in_channels=in_channels)
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
    check_rates(dropout=dropout, drop_path=drop_path)
    if fuse not in get_args(FuseKind):
        raise ValueError(f"fuse is {fuse!r}: choose one of {', '.join(get_args(FuseKind))}")
