"""Residual functions of transformers: attention and the two-layer perceptron, both pre-norm.

Both keep the shape of their stream and leave it untouched, so they can be f and g of a reversible block as
well as the two residuals of an ordinary transformer layer.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from petra.models.parts import DropPath


class Attention(nn.Module):
    """Multi-head self-attention of the normalised stream.

    ``mask`` is boolean, True where a token may be attended to, and broadcasts to (batch, heads, length,
    length). With ``causal`` each token sees itself and those before it, and there is no mask.
    """

    def __init__(
        self, width: int, heads: int, *, dropout: float = 0.0, drop_path: float = 0.0, causal: bool = False
    ) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        # Cut along the last dimension: on the way back the three gradients are joined in one copy, already in
        # the layout that the linear layer reads.
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        dropout = self.dropout.p if self.training else 0.0
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=self.causal)
        return self.drop_path(self.dropout(self.out(y.transpose(1, 2).flatten(2))))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two linear layers with GELU between them, of the normalised stream; companions are none of its business."""

    def __init__(self, width: int, hidden: int, *, dropout: float = 0.0, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.gelu = nn.GELU()
        self.down = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, *companions: Tensor) -> Tensor:
        y = self.down(self.gelu(self.up(self.norm(x))))
        return self.drop_path(self.dropout(y))  # type: ignore[no-any-return]
