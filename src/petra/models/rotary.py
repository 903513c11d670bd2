"""Rotary positions (RoPE, Su et al., 2021): queries and keys are rotated by angles that grow with their position."""

from __future__ import annotations

import torch
from torch import Tensor

_BASE = 10000.0


def rotate(x: Tensor, start: int = 0) -> Tensor:
    """Rotate channel i and channel i + d/2 of the token at position p by the angle p · 10000^(-2i/d).

    The product of a rotated query and a rotated key depends on the difference of their positions only.

    Args:
        x: Queries or keys of shape (…, tokens, d), with d even.
        start: The position of the first token.

    Returns:
        The rotated tensor, in float32 if `x` has a lower precision. The angles are computed at every call: tables in
        buffers would be rounded with the network, and be averaged over replicas as statistics are.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    tokens, d = x.shape[-2:]
    positions = torch.arange(start, start + tokens, device=x.device, dtype=dtype)
    frequencies = _BASE ** (torch.arange(0, d, 2, device=x.device, dtype=dtype) / -d)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
