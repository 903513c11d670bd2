"""Stochastic rounding of float32 to bfloat16, with random numbers that follow from the update and the position.

No generator is used, so a number is rounded alike after a resume, on ranks, on any device and in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B1
"""An odd number near 2³²/φ, whose multiples are far from each other modulo 2³²."""
_OTHER = 0x85EBCA6B
"""Another odd number, so that neither the next update nor the next block has the bits of the next seed."""
_MASK = 0xFFFFFFFF


def position_bits(count: int, device: torch.device) -> Tensor:
    """Return 16 random bits for each of the first positions.

    Args:
        count: The number of positions.
        device: The device.

    Returns:
        An int32 tensor of shape (count,).
    """
    return (_mixed(torch.arange(count, device=device)) >> 16).to(torch.int32)


def block_bits(steps: Tensor, blocks: int, seed: int) -> Tensor:
    """Return two times 16 random bits for each block of each parameter, which differ in every update.

    Args:
        steps: The number of updates of each parameter so far, on the device.
        blocks: The number of blocks of the largest parameter.
        seed: Other seeds give other bits.

    Returns:
        An int32 tensor of shape (2, parameters, blocks).
    """
    first = (steps.long() * _GOLDEN + seed * _OTHER % 2**32).unsqueeze(1)
    mixed = _mixed((first + torch.arange(blocks, device=steps.device)) & _MASK)
    return torch.stack([mixed & 0xFFFF, mixed >> 16]).to(torch.int32)


def round_to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Round to one of the two nearest bfloat16 numbers, to each with the probability that keeps the mean.

    The 16 bits that bfloat16 lacks are the probability of the number that is further from zero.

    Args:
        values: A float32 tensor, which is changed in place.
        bits: Random bits in an int32 tensor that can be broadcast: uniform in [0, 2¹⁶).

    Returns:
        The same tensor, whose values bfloat16 can represent.
    """
    # A GPU makes NaNs of all ones, to which nothing can be added.
    values.view(torch.int32).clamp_(max=0x7FC00000).add_(bits).bitwise_and_(-0x10000)
    return values


def _mixed(x: Tensor) -> Tensor:
    """Replace 32-bit numbers by a hash, in int64, which no product overflows."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x.bitwise_xor_(x >> shift).mul_(factor).bitwise_and_(_MASK)
    return x.bitwise_xor_(x >> 15)
