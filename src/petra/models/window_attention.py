"""Attention within windows of a feature map, with or without shift (Swin Transformer, Section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from petra.models.transformer_parts import truncated_normal_

_ALIGNMENT = 8
"""Fused attention kernels need a bias whose rows begin at multiples of this many elements."""


class WindowAttention(nn.Module):
    """Self-attention of the tokens in each window, with a learned bias for each relative position.

    The map is a square with a side of `size` tokens. If the window does not divide it, the map is padded and the
    padding is masked. If one window covers the map, the window has the size of the map and is not shifted. With
    `shift`, the map is rolled by `shift` before it is cut into windows, and tokens that are neighbours only because of
    the roll do not attend to each other.
    """

    index: Tensor
    mask: Tensor | None

    def __init__(self, width: int, heads: int, size: int, window: int, shift: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.size = size
        self.window = min(window, size)
        self.shift = shift if size > window else 0
        self.windows = -(-size // self.window)  # along one side
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.table = nn.Parameter(torch.empty((2 * self.window - 1) ** 2, heads))
        truncated_normal_(self.table)
        padding = -(self.window**2) % _ALIGNMENT
        index = functional.pad(relative_index(self.window), (0, padding))
        mask = None
        if self.shift or self._padding:
            mask = functional.pad(region_mask(size, self.window, self.shift), (0, padding))
        self.register_buffer("index", index, persistent=False)
        self.register_buffer("mask", mask, persistent=False)

    @property
    def _padding(self) -> int:
        return self.windows * self.window - self.size

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.window**2
        qkv = self.qkv(self._cut(x)).view(-1, tokens, 3, self.heads, x.shape[-1] // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=self._bias(x.shape[0], q.dtype))
        return self._join(self.dropout(self.out(y.transpose(1, 2).flatten(2))))

    def _bias(self, batch: int, dtype: torch.dtype) -> Tensor:
        """The bias of the logits of every window and head, with rows that are aligned in memory."""
        bias = functional.embedding(self.index, self.table).permute(2, 0, 1)
        if self.mask is None:
            bias = bias.to(dtype).contiguous()[None]
        else:
            # Cast before the expansion over the batch, which is cheaper than after it.
            bias = (bias + self.mask[:, None]).to(dtype)
            bias = bias.expand(batch, *bias.shape).flatten(0, 1)
        return bias[..., : self.window**2]

    def _cut(self, x: Tensor) -> Tensor:
        """The map as windows: (batch · windows, tokens, channels)."""
        b, _, _, c = x.shape
        if self._padding:
            x = functional.pad(x, (0, 0, 0, self._padding, 0, self._padding))
        if self.shift:
            x = x.roll((-self.shift, -self.shift), (1, 2))
        x = x.reshape(b, self.windows, self.window, self.windows, self.window, c)
        return x.transpose(2, 3).reshape(-1, self.window**2, c)

    def _join(self, x: Tensor) -> Tensor:
        """The reverse of `_cut`."""
        side, c = self.windows * self.window, x.shape[-1]
        x = x.view(-1, self.windows, self.windows, self.window, self.window, c)
        x = x.transpose(2, 3).reshape(-1, side, side, c)
        if self.shift:
            x = x.roll((self.shift, self.shift), (1, 2))
        if self._padding:
            x = x[:, : self.size, : self.size]
        return x


def relative_index(window: int) -> Tensor:
    """For each pair of tokens in a window, the entry of the table for their relative position."""
    position = torch.arange(window)
    offset = position[:, None] - position + window - 1
    pairs = offset[:, None, :, None] * (2 * window - 1) + offset[None, :, None, :]
    return pairs.reshape(window**2, window**2)


def region_mask(size: int, window: int, shift: int) -> Tensor:
    """For each window, 0 for pairs of tokens that may attend to each other, and -inf for all others.

    The regions that the shift wraps around in each direction, the rest of the map, and the padding do not attend to
    each other.
    """
    side = -(-size // window) * window
    position = torch.arange(side)
    padded = (position + shift) % side >= size
    wrapped = position >= side - shift
    region = 2 * wrapped[:, None].long() + wrapped.long()
    region = region.masked_fill(padded[:, None] | padded, 4)
    windows = side // window
    region = region.view(windows, window, windows, window).transpose(1, 2).reshape(-1, window**2)
    same = region[:, :, None] == region[:, None, :]
    return torch.zeros(same.shape).masked_fill(~same, float("-inf"))
