"""Attention whose queries, keys and values are pooled (MViTv2: Li et al., 2022, Sections 3 and 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from petra.models.parts import draw

_ALIGNMENT = 8
"""Fused attention kernels take heads whose channels are a multiple of this."""
EPS = 1e-6
"""Of MViT's norms."""


class PoolingAttention(nn.Module):
    """Self-attention on a map whose queries are pooled with one stride, keys and values with another.

    Pooling is a depthwise 3×3 convolution, the same for all heads, with a norm after it. Queries are added to
    what they find (residual pooling). With ``relative``, the logit of a query q and a key has q·r + q·c added to
    it, with r learned for their distance in rows and c for that in columns (decomposed relative positions).
    All such products of a query are further channels of it, and the key has ones and zeros there that pick
    two: no bias of queries × keys is made, and a fused kernel needs no mask.
    """

    index: Tensor | None
    places: Tensor | None

    def __init__(
        self,
        inputs: int,
        width: int,
        heads: int,
        size: int,
        *,
        query_stride: int = 1,
        key_stride: int = 1,
        relative: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.channels = width // heads
        self.query_stride = query_stride
        self.key_stride = key_stride
        self.qkv = nn.Linear(inputs, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        # Of queries, keys and values, in this order.
        self.pool = nn.Parameter(torch.empty(3, self.channels, 3, 3))
        nn.init.uniform_(self.pool, -1 / 3, 1 / 3)
        self.norm_weight = nn.Parameter(torch.ones(3 * self.channels))
        self.norm_bias = nn.Parameter(torch.zeros(3 * self.channels))
        index = places = None
        if relative:
            queries, self.keys = pooled(size, query_stride), pooled(size, key_stride)
            # Channels that no key picks, for alignment.
            padding = -(self.channels + 2 * self.keys) % _ALIGNMENT
            index = functional.pad(distance_index(queries, self.keys), (0, padding))
            places = key_places(self.keys, padding)
            self.rows = nn.Parameter(torch.empty(2 * max(queries, self.keys) - 1, self.channels))
            self.columns = nn.Parameter(torch.empty_like(self.rows))
            draw(self.rows)
            draw(self.columns)
        self.register_buffer("index", index, persistent=False)
        self.register_buffer("places", places, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.qkv(x)
        if self.query_stride == self.key_stride:
            q, k, v = self._pooled(x, 0, 3, self.query_stride)
        else:
            width = self.heads * self.channels
            (q,) = self._pooled(x[..., :width], 0, 1, self.query_stride)
            k, v = self._pooled(x[..., width:], 1, 3, self.key_stride)
        queries = q
        if self.places is not None:
            q = torch.cat([q, *self._distances(q)], dim=-1)
            places = self.places.to(k.dtype)[..., None, :].expand(*k.shape[:-1], -1)
            k = torch.cat([k, places], dim=-1)
        q, k, v = (t.flatten(1, 2).transpose(1, 2) for t in (q, k, v))
        found = functional.scaled_dot_product_attention(q, k, v, scale=self.channels**-0.5)
        y = found.transpose(1, 2).reshape(queries.shape) + queries
        return self.dropout(self.out(y.flatten(3)))  # type: ignore[no-any-return]

    def _pooled(self, x: Tensor, first: int, last: int, stride: int) -> tuple[Tensor, ...]:
        """Some of queries, keys and values, each of shape (batch, height, width, heads, channels)."""
        kernel = self.pool[first:last, None].expand(-1, self.heads, -1, -1, -1).reshape(-1, 1, 3, 3)
        x = functional.conv2d(x.permute(0, 3, 1, 2), kernel, stride=stride, padding=1, groups=len(kernel))
        y = torch.unflatten(x.permute(0, 2, 3, 1), 3, (-1, self.heads, self.channels))
        weight = self.norm_weight.view(3, 1, -1)[first:last]
        bias = self.norm_bias.view(3, 1, -1)[first:last]
        y = torch.addcmul(bias, functional.layer_norm(y, (self.channels,), eps=EPS), weight)
        return y.to(x.dtype).unbind(3)

    def _distances(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The products of every query with the vectors of its distances from all rows and from all columns."""
        assert self.index is not None
        unscaled = self.channels**0.5  # attention will scale them with all other channels
        rows = functional.embedding(self.index, self.rows) * unscaled
        columns = functional.embedding(self.index[:, : self.keys], self.columns) * unscaled
        return torch.einsum("bhwnc,hkc->bhwnk", q, rows), torch.einsum("bhwnc,wkc->bhwnk", q, columns)


def pooled(size: int, stride: int) -> int:
    """The side of a map after pooling."""
    return -(-size // stride)


def distance_index(queries: int, keys: int) -> Tensor:
    """For each of the queries and keys along a side, which vector belongs to their distance.

    Distances are those in the finer of the two grids.
    """
    finest, both = max(queries, keys), queries * keys
    return torch.tensor(
        [[finest * (q * keys + (keys - 1 - k) * queries) // both for k in range(keys)] for q in range(queries)]
    )


def key_places(keys: int, padding: int) -> Tensor:
    """For each key of a square map a one in the channel of its row and in that of its column, else zeros."""
    side = torch.eye(keys)
    row = functional.pad(side, (0, padding))[:, None].expand(keys, keys, -1)
    column = side.expand(keys, keys, -1)
    return torch.cat([row, column], dim=-1)
