"""Multiscale vision transformers (MViTv2), plain and reversible (Rev-MViT: Mangalam et al., 2022).

Blocks that preserve the shape are reversible; f is pooling attention and g an MLP. A block that changes the shape is
not reversible: it fuses the two streams and applies a plain block, and both new streams begin as its output.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

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
from petra.models.pooling_attention import EPS, PoolingAttention, pooled_size
from petra.models.registry import register
from petra.models.transformer_parts import DropPath, PlainBlock, check_image, drop_path_rates
from petra.reversible import Network, ReversibleBlock

WidenKind = Literal["attention", "mlp"]


class OverlappingEmbedding(nn.Module):
    """The first layer: a convolution over overlapping patches. It returns a copy per stream."""

    def __init__(self, inputs: int, width: int, image_size: int, patch: int, streams: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.streams = streams
        self.conv = nn.Conv2d(inputs, width, 2 * patch - 1, stride=patch, padding=patch - 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        check_image(x, self.image_size)
        return (self.conv(x).permute(0, 2, 3, 1).contiguous(),) * self.streams


@dataclass(frozen=True)
class BlockShape:
    """The sizes of one block."""

    inputs: int
    """Input channels."""
    width: int
    """Channels of the attention."""
    outputs: int
    """Output channels."""
    heads: int
    """Attention heads."""
    size: int
    """Side of the input feature map."""
    query_stride: int
    """Pooling stride of queries."""
    key_stride: int
    """Pooling stride of keys and values."""

    @property
    def is_preserved(self) -> bool:
        """True if input and output of the block have the same shape."""
        return self.inputs == self.width == self.outputs and self.query_stride == 1


class TransitionBlock(nn.Module):
    """A block that changes the shape: it fuses the streams, pools queries and changes the number of channels.

    x ← pool(project(n)) + attention(n), x ← project(m) + mlp(m), where n and m are the layer norms of x. If the number
    of channels does not change, x is added without norm and projection.
    """

    def __init__(
        self,
        shape: BlockShape,
        mlp_ratio: float,
        *,
        relative: bool,
        dropout: float,
        drop_path: float,
        fuse: FuseKind,
        input_streams: int,
        output_streams: int,
    ) -> None:
        super().__init__()
        self.stride = shape.query_stride
        self.output_streams = output_streams
        self.fuse = Fusion(shape.inputs, fuse if input_streams > 1 else "mean")
        self.norm1 = nn.LayerNorm(shape.inputs, eps=EPS)
        self.attention = _attention(shape, relative, dropout)
        self.project1 = nn.Linear(shape.inputs, shape.width) if shape.width != shape.inputs else None
        self.norm2 = nn.LayerNorm(shape.width, eps=EPS)
        self.mlp = MLP(shape.width, round(shape.width * mlp_ratio), shape.outputs, dropout)
        self.project2 = nn.Linear(shape.width, shape.outputs) if shape.outputs != shape.width else None
        self.drop_path = DropPath(drop_path)

    def forward(self, *streams: Tensor) -> tuple[Tensor, ...]:
        x = self.fuse(*streams)
        n = self.norm1(x)
        if self.project1 is not None:
            x = self.project1(n)
        if self.stride > 1:
            x = functional.max_pool2d(x.permute(0, 3, 1, 2), self.stride + 1, self.stride, (self.stride + 1) // 2)
            x = x.permute(0, 2, 3, 1)
        x = x + self.drop_path(self.attention(n))
        n = self.norm2(x)
        if self.project2 is not None:
            x = self.project2(n)
        return (x + self.drop_path(self.mlp(n)),) * self.output_streams


def mvit(
    *,
    width: int,
    depths: tuple[int, ...],
    heads: tuple[int, ...],
    reversible: bool = True,
    num_classes: int = 1000,
    in_channels: int = 3,
    image_size: int = 224,
    patch: int = 4,
    key_stride: int = 4,
    mlp_ratio: float = 4,
    widen: WidenKind = "attention",
    relative: bool = True,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    fuse: FuseKind = "mean",
) -> Network:
    """Build an MViTv2, plain or reversible.

    The first block of each group but the first halves the resolution.

    Args:
        width: Channels of a stream in the first group; they double in each further group.
        depths: Number of blocks of each group.
        heads: Attention heads of each group.
        reversible: Build reversible blocks where the shape does not change, otherwise plain ones.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        image_size: Height and width of the images.
        patch: Stride of the first convolution.
        key_stride: Stride with which keys and values are pooled in the first group; it halves in each further group.
        mlp_ratio: Hidden channels of an MLP, divided by the channels of the stream.
        widen: Where the channels double: in the first `"attention"` of a group, or in the last `"mlp"` of the group
            before.
        relative: Use relative positions. Without them, only the padding of convolutions carries positions.
        dropout: Rate of dropout.
        drop_path: Rate of stochastic depth in the last block. It grows linearly from 0 in the first block.
        fuse: How two streams become one: their `"mean"`, or a `"linear"` layer or `"mlp"` of both.

    Returns:
        The network: embedding, blocks, head.

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
    if key_stride < 1:
        raise ValueError(f"key_stride is {key_stride}: give 1 or more")
    if widen not in ("attention", "mlp"):
        raise ValueError(f"widen is {widen!r}: choose 'attention' or 'mlp'")
    shapes = _shapes(width, depths, heads, image_size // patch, key_stride, widen)
    # Reversible blocks read and return two streams; between other layers one is enough.
    inverts = [False, *(reversible and shape.is_preserved for shape in shapes.values()), False]
    stem = OverlappingEmbedding(in_channels, width, image_size, patch, 1 + inverts[1])
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    rates = iter(drop_path_rates(sum(depths), drop_path))
    for i, ((name, shape), rate) in enumerate(zip(shapes.items(), rates, strict=True), 1):
        if shape.is_preserved:
            mlp = MLP(shape.width, round(shape.width * mlp_ratio), shape.width, dropout)
            f = ResidualBranch(nn.LayerNorm(shape.width, eps=EPS), _attention(shape, relative, dropout), rate)
            g = ResidualBranch(nn.LayerNorm(shape.width, eps=EPS), mlp, rate)
            layers[name] = ReversibleBlock(f, g) if reversible else PlainBlock(f, g)
        else:
            layers[name] = TransitionBlock(
                shape,
                mlp_ratio,
                relative=relative,
                dropout=dropout,
                drop_path=rate,
                fuse=fuse,
                input_streams=1 + inverts[i - 1],
                output_streams=1 + inverts[i + 1],
            )
    layers["head"] = MapHead(width << (len(depths) - 1), num_classes, EPS)
    network = Network(layers)
    initialise_hierarchy(network)
    return network


def _shapes(
    width: int, depths: tuple[int, ...], heads: tuple[int, ...], size: int, key_stride: int, widen: WidenKind
) -> dict[str, BlockShape]:
    """The shapes of all blocks by name."""
    shapes: dict[str, BlockShape] = {}
    inputs = width
    for group, depth in enumerate(depths):
        inner = width << group
        for block in range(depth):
            stride = 2 if group and not block else 1
            widens = widen == "mlp" and block == depth - 1 and group < len(depths) - 1
            outputs = 2 * inner if widens else inner
            keys = max(key_stride >> group, 1)
            shapes[f"group{group + 1}_block{block}"] = BlockShape(
                inputs, inner, outputs, heads[group], size, stride, keys
            )
            inputs = outputs
            size = pooled_size(size, stride)
    return shapes


def _attention(shape: BlockShape, relative: bool, dropout: float) -> PoolingAttention:
    return PoolingAttention(
        shape.inputs,
        shape.width,
        shape.heads,
        shape.size,
        query_stride=shape.query_stride,
        key_stride=shape.key_stride,
        relative=relative,
        dropout=dropout,
    )


for _letter, _width, _depths, _heads, _widen in (
    ("S", 96, (1, 2, 11, 2), 1, "attention"),
    ("B", 96, (2, 3, 16, 3), 1, "attention"),
    ("L", 144, (2, 6, 36, 4), 2, "mlp"),
    ("H", 192, (4, 8, 60, 8), 3, "attention"),
):
    for _reversible in (True, False):
        register(
            f"{'rev-' if _reversible else ''}mvit-{_letter.lower()}",
            f"{'reversible ' if _reversible else ''}MViTv2-{_letter}, up to {sum(_depths) + 2} stages",
            mvit,
            reversible=_reversible,
            width=_width,
            depths=_depths,
            heads=tuple(_heads << group for group in range(4)),
            widen=_widen,
        )
