"""Vision transformers, reversible (Rev-ViT) and plain (ViT), with the same parameters."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from petra.models.registry import register
from petra.models.transformer import initialise_transformer, transformer_blocks
from petra.models.transformer_parts import check_image, check_sizes, mean_stream, truncated_normal_
from petra.reversible import Network


class ImageEmbedding(nn.Module):
    """The first layer: embeds patches, a class token and their positions, and returns a copy per stream."""

    def __init__(self, inputs: int, image_size: int, patch: int, width: int, dropout: float, streams: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.streams = streams
        self.patches = nn.Conv2d(inputs, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.empty(1, (image_size // patch) ** 2 + 1, width))
        truncated_normal_(self.position)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        check_image(x, self.image_size)
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], dim=1) + self.position
        return (self.dropout(x),) * self.streams


class ClassTokenHead(nn.Module):
    """The last layer, on the class token: mean of the streams, layer norm, and a linear classifier."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, *streams: Tensor) -> Tensor:
        return self.fc(self.norm(mean_stream(tuple(x[:, 0] for x in streams))))  # type: ignore[no-any-return]


def vit(
    *,
    width: int,
    depth: int,
    heads: int,
    reversible: bool = True,
    num_classes: int = 1000,
    in_channels: int = 3,
    image_size: int = 224,
    patch: int = 16,
    mlp_ratio: float = 4,
    dropout: float = 0.0,
    drop_path: float = 0.0,
) -> Network:
    """Build a vision transformer, plain or reversible.

    Args:
        width: Channels of a stream.
        depth: Number of blocks.
        heads: Attention heads per block.
        reversible: Build reversible blocks, otherwise plain ones.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        image_size: Height and width of the images.
        patch: Height and width of a patch.
        mlp_ratio: Hidden channels of an MLP, divided by `width`.
        dropout: Rate of dropout.
        drop_path: Rate of stochastic depth in the last block. It grows linearly from 0 in the first block.

    Returns:
        The network: embedding, blocks, head.

    Raises:
        ValueError: If a size or rate is invalid.
    """
    check_sizes(num_classes=num_classes, in_channels=in_channels, image_size=image_size, patch=patch)
    if image_size % patch:
        raise ValueError(f"image_size {image_size} is not a multiple of patch {patch}: give a patch that divides it")
    inner = transformer_blocks(
        reversible=reversible,
        width=width,
        depth=depth,
        heads=heads,
        mlp_ratio=mlp_ratio,
        dropout=dropout,
        drop_path=drop_path,
    )
    stem = ImageEmbedding(in_channels, image_size, patch, width, dropout, streams=2 if reversible else 1)
    network = Network(OrderedDict(stem=stem, **inner, head=ClassTokenHead(width, num_classes)))
    initialise_transformer(network)
    return network


for _letter, _width, _depth, _heads, _patch in (
    ("S", 384, 12, 6, 16),
    ("B", 768, 12, 12, 16),
    ("L", 1024, 24, 16, 16),
    ("H", 1280, 32, 16, 14),
):
    for _reversible in (True, False):
        register(
            f"{'rev-' if _reversible else ''}vit-{_letter.lower()}",
            f"{'reversible ' if _reversible else ''}ViT-{_letter}/{_patch}, up to {_depth + 2} stages",
            vit,
            reversible=_reversible,
            width=_width,
            depth=_depth,
            heads=_heads,
            patch=_patch,
        )
