"""Stand-ins for blocks of timm and Hugging Face, which the tests do not install: same class, parts and arithmetic."""

import torch
from torch import nn


class Attention(nn.Module):
    """Self-attention that takes a mask; remembers the masks that it was called with."""

    def __init__(self, width, dropout=0.2):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.drop = nn.Dropout(dropout)
        self.masks = []

    def forward(self, x, attn_mask=None):
        self.masks.append(attn_mask)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.drop(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask))


class DropPath(nn.Module):
    def forward(self, x):
        return x * torch.bernoulli(torch.full((len(x), 1, 1), 0.8)).to(x) if self.training else x


def mlp(width):
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return x * self.gamma


class Block(nn.Module):
    """timm's ViT block."""

    def __init__(self, width=4):
        super().__init__()
        self.norm1, self.attn, self.ls1, self.drop_path1 = (
            nn.LayerNorm(width),
            Attention(width),
            Scale(width),
            DropPath(),
        )
        self.norm2, self.mlp, self.ls2, self.drop_path2 = nn.LayerNorm(width), mlp(width), Scale(width), DropPath()

    def forward(self, x, attn_mask=None):
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class SwinTransformerBlock(nn.Module):
    """timm's Swin block; what it does with windows is a shift here."""

    def __init__(self, width=4):
        super().__init__()
        self.dim, self.input_resolution = width, (2, 3)
        self.norm1, self.attn, self.drop_path1 = nn.LayerNorm(width), Attention(width), nn.Identity()
        self.norm2, self.mlp, self.drop_path2 = nn.LayerNorm(width), mlp(width), nn.Dropout(0.2)
        self.register_buffer("shift", torch.tensor(1.5))

    def _attn(self, x):
        rolled = self.shift * torch.roll(x, 1, dims=1)
        return self.attn(rolled.flatten(1, 2)).view_as(x)

    def forward(self, x):
        x = x + self.drop_path1(self._attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class SwinTransformerV2Block(SwinTransformerBlock):
    """timm's second Swin block: the same parts, but normalised before they are added."""

    def forward(self, x):
        x = x + self.drop_path1(self.norm1(self._attn(x)))
        return x + self.drop_path2(self.norm2(self.mlp(x)))


class CachedAttention(Attention):
    """Attention as Hugging Face's: by other names, returning its weights too, with a cache."""

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        if past_key_values is not None:
            past_key_values.append(hidden_states)
        return super().forward(hidden_states, attention_mask), None


class GPT2Block(nn.Module):
    """Hugging Face's GPT-2 block up to version 5.0: it returns a tuple."""

    def __init__(self, width=4):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), CachedAttention(width)
        self.ln_2, self.mlp = nn.LayerNorm(width), mlp(width)

    def forward(
        self, hidden_states, past_key_values=None, attention_mask=None, encoder_hidden_states=None, **kwargs
    ) -> torch.Tensor:  # announces the one and returns the other, as version 5.0 does
        x = hidden_states + self.attn(self.ln_1(hidden_states), attention_mask, past_key_values, **kwargs)[0]
        return (x + self.mlp(self.ln_2(x)),)


class Encoder(nn.Module):
    """Calls its blocks as Hugging Face's networks do."""

    def __init__(self, blocks):
        super().__init__()
        self.layer = nn.ModuleList(blocks)

    def forward(self, x, attention_mask=None, cache=None, **kwargs):
        for block in self.layer:
            x = block(x, cache, attention_mask, use_cache=False, **kwargs)[0]
        return x


class Plain(nn.Module):
    """Calls its blocks with a mask, as timm's ViT does."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x, attn_mask=mask)
        return x


class Swin(nn.Module):
    """Two resolutions."""

    def __init__(self, depth, block=SwinTransformerBlock):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(*(block() for _ in range(depth))) for _ in range(2)))

    def forward(self, x):
        return self.layers[1](self.layers[0](x).transpose(0, 1)).transpose(0, 1)


for cls in (Block, SwinTransformerBlock, SwinTransformerV2Block):
    cls.__module__ = "timm.models.stand_in"
GPT2Block.__module__ = "transformers.models.stand_in"


class Own(nn.Module):
    """A block that no library knows."""

    def __init__(self, width=4):
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, gain=None):
        gain = 1 if gain is None else gain
        x = x + torch.tanh(self.one(x)) * gain
        return x + torch.tanh(self.two(x)) * gain


class Gained(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear, self.drop = linear, nn.Dropout(0.5)

    def forward(self, x, gain=None):
        return self.drop(torch.tanh(self.linear(x))) * (1 if gain is None else gain)


def split(block):
    return (Gained(block.one), Gained(block.two)) if isinstance(block, Own) else None


class Gains(nn.Module):
    """Hands its blocks a parameter."""

    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Own() for _ in range(depth))
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, gain=self.gain)
        return x
