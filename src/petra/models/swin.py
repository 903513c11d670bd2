"""Swin Transformers, plain and reversible (Rev-Swin, PaReprop Section 3.4).

All blocks of a group are reversible; f is attention within windows and g an MLP. Between groups, the two streams are
fused and 2×2 tokens are merged, and both new streams begin as the result.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional

from petra.models.hierarchy import (
    MLP,
    FuseKind,
    Fusion,
    MapHead,
    ResidualBranch,
    check_hierarchy,
    initialise_hierarchy,
)
from petra.models.registry import register
from petra.models.transformer_parts import PlainBlock, check_image, drop_path_rates
from petra.models.window_attention import WindowAttention
from petra.reversible import Network, ReversibleBlock


class PatchEmbedding(nn.Module):
    """The first layer: a linear map of each patch and a layer norm. It returns a copy per stream."""

    def __init__(self, inputs: int, width: int, image_size: int, patch: int, dropout: float, streams: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.streams = streams
        self.conv = nn.Conv2d(inputs, width, patch, stride=patch)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        check_image(x, self.image_size)
        return (self.dropout(self.norm(self.conv(x).permute(0, 2, 3, 1))),) * self.streams


class PatchMerging(nn.Module):
    """Fuses the streams, halves the resolution and doubles the channels: 2×2 tokens become one."""

    def __init__(self, width: int, size: int, fuse: FuseKind, streams: int) -> None:
        super().__init__()
        self.odd = size % 2
        self.streams = streams
        self.fuse = Fusion(width, fuse if streams > 1 else "mean")
        self.norm = nn.LayerNorm(4 * width)
        self.reduce = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, *streams: Tensor) -> tuple[Tensor, ...]:
        x = self.fuse(*streams)
        if self.odd:
            x = functional.pad(x, (0, 0, 0, 1, 0, 1))
        # The channels of the four tokens are concatenated column by column, as Swin's weights expect them.
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return (self.reduce(self.norm(x)),) * self.streams


def swin(
    *,
    width: int,
    depths: tuple[int, ...],
    heads: tuple[int, ...],
    reversible: bool = True,
    num_classes: int = 1000,
    in_channels: int = 3,
    image_size: int = 224,
    patch: int = 4,
    window: int = 7,
    mlp_ratio: float = 4,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    fuse: FuseKind = "mean",
) -> Network:
    """Build a Swin Transformer, plain or reversible.

    The resolution halves between groups. In every second block, windows are shifted by half their size.

    Args:
        width: Channels of a stream in the first group; they double in each further group.
        depths: Number of blocks of each group.
        heads: Attention heads of each group.
        reversible: Build reversible blocks, otherwise plain ones.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        image_size: Height and width of the images.
        patch: Height and width of a patch.
        window: Height and width of an attention window, in tokens.
        mlp_ratio: Hidden channels of an MLP, divided by the channels of the stream.
        dropout: Rate of dropout.
        drop_path: Rate of stochastic depth in the last block. It grows linearly from 0 in the first block.
        fuse: How two streams become one: their `"mean"`, or a `"linear"` layer or `"mlp"` of both.

    Returns:
        The network: embedding, blocks and mergings, head.

    Raises:
        ValueError: If a size or rate is invalid.
    """
    check_hierarchy(
        width=width,
        depths=depths,
        heads=heads,
        image_size=image_size,
        patch=patch,
        mlp_ratio=mlp_ratio,
        num_classes=num_classes,
        in_channels=in_channels,
        dropout=dropout,
        drop_path=drop_path,
        fuse=fuse,
    )
    if window < 1:
        raise ValueError(f"window is {window}: give its side in tokens, 1 or more")
    streams, kind = (2, ReversibleBlock) if reversible else (1, PlainBlock)
    stem = PatchEmbedding(in_channels, width, image_size, patch, dropout, streams)
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    rates = iter(drop_path_rates(sum(depths), drop_path))
    size = image_size // patch
    for group, depth in enumerate(depths):
        inner = width << group
        if group:
            layers[f"group{group + 1}_merging"] = PatchMerging(inner // 2, size, fuse, streams)
            size = (size + 1) // 2
        for block in range(depth):
            rate = next(rates)
            shift = window // 2 if block % 2 else 0
            attention = WindowAttention(inner, heads[group], size, window, shift, dropout)
            mlp = MLP(inner, round(inner * mlp_ratio), inner, dropout)
            f = ResidualBranch(nn.LayerNorm(inner), attention, rate)
            g = ResidualBranch(nn.LayerNorm(inner), mlp, rate)
            layers[f"group{group + 1}_block{block}"] = kind(f, g)
    layers["head"] = MapHead(width << (len(depths) - 1), num_classes)
    network = Network(layers)
    initialise_hierarchy(network)
    return network


# Only the 661M parameters of G are published. 352 is the width that comes closest to them with the depths of L and 32
# channels per head.
for _letter, _width, _depths in (
    ("T", 96, (2, 2, 6, 2)),
    ("S", 96, (2, 2, 18, 2)),
    ("B", 128, (2, 2, 18, 2)),
    ("L", 192, (2, 2, 18, 2)),
    ("G", 352, (2, 2, 18, 2)),
):
    for _reversible in (True, False):
        register(
            f"{'rev-' if _reversible else ''}swin-{_letter.lower()}",
            f"{'reversible ' if _reversible else ''}Swin-{_letter}, up to {sum(_depths) + 5} stages",
            swin,
            reversible=_reversible,
            width=_width,
            depths=_depths,
            heads=tuple(_width // 32 << group for group in range(4)),
        )
