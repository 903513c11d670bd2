"""Newton-Schulz iteration: replaces the singular values of matrices by values near 1, with matrix products alone."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of the polynomial aσ + bσ³ + cσ⁵ (Jordan et al., "Muon", 2024)."""


def orthogonalize(matrices: Tensor, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype | None = None) -> Tensor:
    """Return the orthogonal factors U·Vᵀ of matrices U·Σ·Vᵀ, approximately.

    Matrices are divided by their Frobenius norm. Each iteration then applies aσ + bσ³ + cσ⁵ to all singular values σ.
    After five iterations, those that were not very small are between 0.7 and 1.2, which is enough for an optimizer.

    Args:
        matrices: A batch of matrices of shape (batch, rows, columns).
        steps: The number of iterations.
        eps: The smallest norm to divide by.
        dtype: The dtype of the iterations; None for bfloat16 on a GPU and that of the matrices elsewhere.

    Returns:
        A batch of the same shape and dtype.
    """
    if dtype is None:
        dtype = torch.bfloat16 if matrices.is_cuda else matrices.dtype
    tall = matrices.shape[-2] > matrices.shape[-1]
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp(min=eps)
    x = (matrices / norms).to(dtype)
    if tall:  # the products X·Xᵀ are then small
        x = x.mT
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        square = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)  # b·A + c·A²
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a·X + (b·A + c·A²)·X
    result: Tensor = (x.mT if tall else x).to(matrices.dtype)
    return result
