"""Residual branches of transformers: attention and the MLP, both with a layer norm in front.

Both preserve the shape of their input stream and do not modify it, so they can be f and g of a reversible block as well
as the two residual branches of a plain transformer block.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from petra.models.transformer_parts import DropPath


class AttentionBranch(nn.Module):
    """Layer norm and multi-head self-attention.

    The mask is boolean, True for tokens to attend to, and broadcasts to (batch, heads, seq_len, seq_len). With
    `causal`, each token attends to itself and to earlier tokens, and no mask is given.
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
        # Split along the last dimension: the backward pass then concatenates the three gradients with one copy, in the
        # layout that the linear layer reads.
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        dropout = self.dropout.p if self.training else 0.0
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=self.causal)
        return self.drop_path(self.dropout(self.out(y.transpose(1, 2).flatten(2))))  # type: ignore[no-any-return]


class MLPBranch(nn.Module):
    """Layer norm and two linear layers with GELU between them. It ignores companions, such as the attention mask."""

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
