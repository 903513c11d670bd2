"""Residual branches of transformers: attention and the MLP, both with a norm in front.

Both preserve the shape of their input stream and do not modify it, so they can be f and g of a reversible block as well
as the two residual branches of a plain transformer block.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from petra.models.key_value_cache import CachingModule
from petra.models.rotary import rotate
from petra.models.transformer_parts import RMS_EPSILON, BlockStyle, DropPath, make_norm

GPT2_STYLE = BlockStyle()


class AttentionBranch(CachingModule):
    """Norm and multi-head self-attention.

    The mask is boolean, True for tokens to attend to, and broadcasts to (batch, heads, seq_len, seq_len). With
    `causal`, each token attends to itself and to earlier tokens, and no mask is given.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        causal: bool = False,
        style: BlockStyle = GPT2_STYLE,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.rotary = style.rotary
        self.channels = width // heads
        self.heads = heads
        self.kv_heads = style.kv_heads or heads
        self.scale = style.residual_scale
        self.norm = make_norm(style.norm, width, style.bias)
        self.qkv = nn.Linear(width, (heads + 2 * self.kv_heads) * self.channels, bias=style.bias)
        self.q_norm = nn.RMSNorm(self.channels, eps=RMS_EPSILON) if style.qk_norm else None
        self.k_norm = nn.RMSNorm(self.channels, eps=RMS_EPSILON) if style.qk_norm else None
        self.out = nn.Linear(width, width, bias=style.bias)
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        # Split along the last dimension: the backward pass then concatenates the three gradients with one copy, in the
        # layout that the linear layer reads.
        sizes = [heads * self.channels for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (
            part.unflatten(-1, (-1, self.channels)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(sizes, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            # Under autocast, queries and keys have a lower precision than the weights: normalise in the higher one.
            q = self.q_norm(q.to(self.q_norm.weight.dtype))
            k = self.k_norm(k.to(self.k_norm.weight.dtype))
        cache = self.cache
        if self.rotary:
            start = 0 if cache is None else cache.start
            q, k = rotate(q, start), rotate(k, start)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if cache is not None:
            k, v = cache.extend(self, k, v)
        y = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout.p if self.training else 0.0,
            is_causal=self.causal and (cache is None or q.shape[2] > 1),  # one new token attends to all in the cache
            enable_gqa=self.kv_heads != self.heads,
        )
        y = self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return self.drop_path(y if self.scale == 1 else y * self.scale)  # type: ignore[no-any-return]


class MLPBranch(nn.Module):
    """Norm and an MLP. It ignores companions, such as the attention mask.

    The MLP is two linear layers with GELU between them, or SwiGLU: down(SiLU(gate) · up), where one linear layer
    computes gate and up.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        style: BlockStyle = GPT2_STYLE,
    ) -> None:
        super().__init__()
        self.gated = style.mlp == "swiglu"
        self.scale = style.residual_scale
        self.norm = make_norm(style.norm, width, style.bias)
        self.up = nn.Linear(width, 2 * hidden if self.gated else hidden, bias=style.bias)
        self.gelu = nn.GELU()
        self.down = nn.Linear(hidden, width, bias=style.bias)
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, *companions: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        if self.gated:
            gate, up = y.chunk(2, dim=-1)
            y = silu(gate) * up
        else:
            y = self.gelu(y)
        y = self.dropout(self.down(y))
        return self.drop_path(y if self.scale == 1 else y * self.scale)  # type: ignore[no-any-return]
