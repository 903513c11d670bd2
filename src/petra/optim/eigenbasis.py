"""Eigenvectors of batches of symmetric matrices that change slowly."""

from __future__ import annotations

import torch
from torch import Tensor


def eigenbasis(matrices: Tensor) -> Tensor:
    """Return the eigenvectors of symmetric matrices as columns, those of the largest eigenvalues first.

    Args:
        matrices: A batch of shape (batch, size, size).

    Returns:
        A batch of the same shape and dtype.
    """
    exact = matrices.to(_decomposable(matrices.dtype))
    try:
        vectors: Tensor = torch.linalg.eigh(exact).eigenvectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # in float64 it converges if at all
        vectors = torch.linalg.eigh(exact.double()).eigenvectors
    return vectors.flip(-1).to(matrices.dtype)


def improve_basis(matrices: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Move a basis closer to the eigenvectors by one step of power iteration, made orthogonal by a QR decomposition.

    Columns are sorted by their Rayleigh quotients first, because the QR decomposition makes each column orthogonal to
    those before it: the columns with the largest eigenvalues should change least.

    Args:
        matrices: A batch of symmetric matrices of shape (batch, size, size).
        basis: An orthogonal matrix for each.

    Returns:
        The new basis, and for each matrix the old index of every column.
    """
    exact = matrices.to(_decomposable(matrices.dtype))
    old = basis.to(exact.dtype)
    product = torch.bmm(exact, old)
    order = (old * product).sum(-2).argsort(dim=-1, descending=True, stable=True)
    ordered = product.gather(-1, order.unsqueeze(-2).expand_as(product))
    return torch.linalg.qr(ordered).Q.to(basis.dtype), order


def _decomposable(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype for which decompositions exist."""
    return dtype if dtype == torch.float64 else torch.float32
