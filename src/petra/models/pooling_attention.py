"""Attention with pooled queries, keys and values (MViTv2: Li et al., 2022, Sections 3 and 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from petra.models.transformer_parts import truncated_normal_

_ALIGNMENT = 8
"""Fused attention kernels need channels per head that are a multiple of this."""
EPS = 1e-6
"""Epsilon of the layer norms of MViT."""


class PoolingAttention(nn.Module):
    """Self-attention on a feature map, with one pooling stride for queries and another for keys and values.

    Pooling is a depthwise 3×3 convolution, the same for all heads, followed by a layer norm. The pooled queries are
    added to the result of the attention (residual pooling). With `relative`, q·r + q·c is added to the logit of a query
    q and a key, where r is a learned vector for their distance in rows and c for their distance in columns (decomposed
    relative positions). All these products are appended to the channels of the query. The key has a one-hot code of its
    row and column there, which selects two of them. So no bias of queries × keys is computed, and fused kernels need no
    mask.
    """

    index: Tensor | None
    key_positions: Tensor | None

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
        # Kernels of queries, keys and values, in this order.
        self.pool = nn.Parameter(torch.empty(3, self.channels, 3, 3))
        nn.init.uniform_(self.pool, -1 / 3, 1 / 3)
        self.norm_weight = nn.Parameter(torch.ones(3 * self.channels))
        self.norm_bias = nn.Parameter(torch.zeros(3 * self.channels))
        index = key_positions = None
        if relative:
            queries, self.keys = pooled_size(size, query_stride), pooled_size(size, key_stride)
            # Channels that no key selects, for alignment.
            padding = -(self.channels + 2 * self.keys) % _ALIGNMENT
            index = functional.pad(distance_index(queries, self.keys), (0, padding))
            key_positions = one_hot_positions(self.keys, padding)
            self.rows = nn.Parameter(torch.empty(2 * max(queries, self.keys) - 1, self.channels))
            self.columns = nn.Parameter(torch.empty_like(self.rows))
            truncated_normal_(self.rows)
            truncated_normal_(self.columns)
        self.register_buffer("index", index, persistent=False)
        self.register_buffer("key_positions", key_positions, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.qkv(x)
        if self.query_stride == self.key_stride:
            q, k, v = self._pool(x, 0, 3, self.query_stride)
        else:
            width = self.heads * self.channels
            (q,) = self._pool(x[..., :width], 0, 1, self.query_stride)
            k, v = self._pool(x[..., width:], 1, 3, self.key_stride)
        queries = q
        if self.key_positions is not None:
            q = torch.cat([q, *self._relative_logits(q)], dim=-1)
            key_positions = self.key_positions.to(k.dtype)[..., None, :].expand(*k.shape[:-1], -1)
            k = torch.cat([k, key_positions], dim=-1)
        q, k, v = (t.flatten(1, 2).transpose(1, 2) for t in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, scale=self.channels**-0.5)
        y = attended.transpose(1, 2).reshape(queries.shape) + queries
        return self.dropout(self.out(y.flatten(3)))  # type: ignore[no-any-return]

    def _pool(self, x: Tensor, first: int, last: int, stride: int) -> tuple[Tensor, ...]:
        """Pool some of queries, keys and values; each result has shape (batch, height, width, heads, channels)."""
        kernel = self.pool[first:last, None].expand(-1, self.heads, -1, -1, -1).reshape(-1, 1, 3, 3)
        x = functional.conv2d(x.permute(0, 3, 1, 2), kernel, stride=stride, padding=1, groups=len(kernel))
        y = torch.unflatten(x.permute(0, 2, 3, 1), 3, (-1, self.heads, self.channels))
        weight = self.norm_weight.view(3, 1, -1)[first:last]
        bias = self.norm_bias.view(3, 1, -1)[first:last]
        y = torch.addcmul(bias, functional.layer_norm(y, (self.channels,), eps=EPS), weight)
        return y.to(x.dtype).unbind(3)

    def _relative_logits(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The products of every query with the vectors of its distances to all rows and to all columns."""
        assert self.index is not None
        unscaled = self.channels**0.5  # cancels the scale that attention applies to all channels
        rows = functional.embedding(self.index, self.rows) * unscaled
        columns = functional.embedding(self.index[:, : self.keys], self.columns) * unscaled
        return torch.einsum("bhwnc,hkc->bhwnk", q, rows), torch.einsum("bhwnc,wkc->bhwnk", q, columns)


def pooled_size(size: int, stride: int) -> int:
    """The side of a feature map after pooling."""
    return -(-size // stride)


def distance_index(queries: int, keys: int) -> Tensor:
    """For each query and key along one side, the index of the vector for their distance.

    Distances are measured in the finer of the two grids.
    """
    finest, product = max(queries, keys), queries * keys
    return torch.tensor(
        [[finest * (q * keys + (keys - 1 - k) * queries) // product for k in range(keys)] for q in range(queries)]
    )


def one_hot_positions(keys: int, padding: int) -> Tensor:
    """For each key of a square map, the one-hot codes of its row and of its column."""
    side = torch.eye(keys)
    row = functional.pad(side, (0, padding))[:, None].expand(keys, keys, -1)
    column = side.expand(keys, keys, -1)
    return torch.cat([row, column], dim=-1)
