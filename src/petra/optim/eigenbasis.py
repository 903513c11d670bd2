"""Eigenvectors of batches of symmetric matrices that change slowly.

Many of these matrices are singular: the parts of a convolution's kernel that see only padding give rows of zeros. Their
decompositions may not converge, or may contain NaN without an error. They are then repeated in a more robust way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SHIFT = 1e-7
"""The shift of the diagonal of a matrix that could not be decomposed, relative to its largest entry."""


def eigenbasis(matrices: Tensor) -> Tensor:
    """Return the eigenvectors of symmetric matrices as columns, those of the largest eigenvalues first.

    Args:
        matrices: A batch of positive semidefinite matrices of shape (batch, size, size).

    Returns:
        A batch of the same shape and dtype: NaN for matrices that are not finite, orthogonal matrices for all others.
    """
    exact = matrices.to(_decomposable(matrices.dtype))
    broken = _broken(exact)
    exact = exact.masked_fill(broken, 0)
    vectors = _until_finite(
        _eigenvectors(exact),
        lambda failed: _eigenvectors(_shifted(exact[failed])),
        lambda failed: _eigenvectors(_shifted(exact[failed].double())),
        lambda failed: _axes(exact[failed]),
    )
    return vectors.flip(-1).masked_fill_(broken, torch.nan).to(matrices.dtype)


def improve_basis(matrices: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Move a basis closer to the eigenvectors by one step of power iteration, made orthogonal by a QR decomposition.

    Columns are sorted by their Rayleigh quotients first, because the QR decomposition makes each column orthogonal to
    those before it: the columns with the largest eigenvalues should change least.

    Args:
        matrices: A batch of positive semidefinite matrices of shape (batch, size, size).
        basis: An orthogonal matrix for each.

    Returns:
        The new basis, which is NaN for matrices that are not finite, and for each matrix the old index of every column.
    """
    exact = matrices.to(_decomposable(matrices.dtype))
    old = basis.to(exact.dtype)
    product = torch.bmm(exact, old)
    broken = _broken(product)
    # Without NaN, every order is a permutation whatever the device does with NaN.
    order = (old * product).sum(-2).nan_to_num().argsort(dim=-1, descending=True, stable=True)

    def column_order(values: Tensor, which: Tensor) -> Tensor:
        return values.gather(-1, which.unsqueeze(-2).expand_as(values))

    def repeat(failed: Tensor) -> Tensor:
        sorted_old = column_order(old[failed], order[failed]).double()
        again: Tensor = torch.linalg.qr(torch.bmm(_shifted(exact[failed].double()), sorted_old)).Q
        return again

    better = _until_finite(
        torch.linalg.qr(column_order(product.masked_fill_(broken, 0), order)).Q,
        repeat,
        lambda failed: column_order(old[failed], order[failed]),
    )
    return better.masked_fill_(broken, torch.nan).to(basis.dtype), order


def _until_finite(found: Tensor, *repetitions: Callable[[Tensor], Tensor]) -> Tensor:
    """Repeat what gave NaN, in place; each repetition is called with the indices of the matrices that failed."""
    for repeat in repetitions:
        if found.is_meta or bool(found.isfinite().all()):
            break
        failed = _broken(found).flatten().nonzero().flatten()
        found[failed] = repeat(failed).to(found.dtype)
    return found


def _eigenvectors(matrices: Tensor) -> Tensor:
    """Return eigenvectors in the order of their eigenvalues, NaN where the decomposition does not converge."""
    try:
        vectors: Tensor = torch.linalg.eigh(matrices).eigenvectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        if len(matrices) == 1:
            return torch.full_like(matrices, torch.nan)
        # The error is for the whole batch. The others should not depend on the matrix that failed.
        return torch.cat([_eigenvectors(one) for one in matrices.unsqueeze(1)])
    return vectors


def _shifted(matrices: Tensor) -> Tensor:
    """Return matrices with the same eigenvectors, but without tiny values and eigenvalues of zero."""
    largest = matrices.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=torch.finfo(matrices.dtype).tiny)
    scaled = matrices / largest[:, None, None]
    scaled.diagonal(dim1=-2, dim2=-1).add_(SHIFT)
    return scaled


def _axes(matrices: Tensor) -> Tensor:
    """Return the unit vectors in the order of the diagonals: power iteration can start from them."""
    order = matrices.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, stable=True)
    return torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)[order].mT


def _broken(matrices: Tensor) -> Tensor:
    """Return for each matrix whether it has NaN or infinite values, with shape (batch, 1, 1)."""
    return ~matrices.isfinite().all(-1).all(-1)[:, None, None]


def _decomposable(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype for which decompositions exist."""
    return dtype if dtype == torch.float64 else torch.float32
