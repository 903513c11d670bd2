"""Parts that Swin and MViT share: residual branches, fusion of the streams, head, initialisation.

Streams are feature maps of shape (batch, height, width, channels).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from petra.models.transformer_parts import (
    DropPath,
    check_rates,
    check_sizes,
    hidden_channels,
    mean_stream,
    truncated_normal_,
)

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


class ResidualBranch(nn.Module):
    """A residual branch: norm, body, stochastic depth."""

    def __init__(self, norm: nn.Module, body: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.norm = norm
        self.body = body
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop_path(self.body(self.norm(x)))  # type: ignore[no-any-return]


class Fusion(nn.Module):
    """Fuses the two streams where the resolution changes (PaReprop, Section 3.4 and Figure 4).

    The result is their mean, or a linear layer or MLP of their concatenation. A single stream is returned as it is.
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
            return mean_stream(streams)
        return self.project(torch.cat(streams, dim=-1))  # type: ignore[no-any-return]

    def initialise_as_mean(self) -> None:
        """Set the weights of a linear fusion so that it is the mean of the streams."""
        if isinstance(self.project, nn.Linear):
            half = torch.eye(self.project.out_features) / 2
            with torch.no_grad():
                self.project.weight.copy_(torch.cat([half, half], dim=1))


class MapHead(nn.Module):
    """The last layer: mean of the streams, layer norm, average pooling, linear classifier."""

    def __init__(self, width: int, num_classes: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, *streams: Tensor) -> Tensor:
        return self.fc(self.norm(mean_stream(streams)).mean(dim=(1, 2)))  # type: ignore[no-any-return]


def initialise_hierarchy(network: nn.Module) -> None:
    """Initialise linear weights from a truncated normal distribution, biases with zero, linear fusion as the mean."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            truncated_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in network.modules():
        if isinstance(module, Fusion):
            module.initialise_as_mean()


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
    """Raise `ValueError` if an argument is invalid."""
    check_sizes(width=width, image_size=image_size, patch=patch, num_classes=num_classes, in_channels=in_channels)
    if not depths or min(depths) < 1:
        raise ValueError(f"depths is {depths}: give the number of blocks of each group, each 1 or more")
    if len(heads) != len(depths):
        raise ValueError(f"heads is {heads}, but there are {len(depths)} groups: give one number per group")
    for group, number in enumerate(heads):
        if number < 1 or (width << group) % number:
            raise ValueError(
                f"group {group + 1} has {width << group} channels, which is not a multiple of its {number} heads: "
                "give each group a number of heads that divides its channels"
            )
    if image_size % patch:
        raise ValueError(f"image_size {image_size} is not a multiple of patch {patch}: give a patch that divides it")
    hidden_channels(width, mlp_ratio)
    check_rates(dropout=dropout, drop_path=drop_path)
    if fuse not in get_args(FuseKind):
        raise ValueError(f"fuse is {fuse!r}: choose one of {', '.join(get_args(FuseKind))}")
