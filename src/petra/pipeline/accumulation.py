"""Accumulates the gradients of a stage's parameters over micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from petra.reversible.gradients import ParameterGradients
from petra.reversible.streams import Gradients, laid_out_like, storage_id


def accumulate(found: ParameterGradients, messages: Gradients, sums: dict[Tensor, Tensor]) -> None:
    """Add gradients to those that the parameters have.

    Args:
        found: The gradients of one micro-batch.
        messages: Gradients that are sent to other stages, whose memory no parameter may share.
        sums: The sums that this function has computed since the last update, by parameter.
    """
    # A gradient may be the same tensor as a message or as the gradient of another parameter (a bias that is
    # added to a stream, for example). Optimizers and clipping modify gradients, so each parameter gets its own.
    taken = {storage_id(g) for g in messages if g is not None}
    for parameter, gradient in found.items():
        if not gradient.is_sparse:
            gradient = laid_out_like(gradient, parameter)
        if parameter.grad is not None:
            if sums.get(parameter) is parameter.grad:  # computed here, so it may be changed in place
                parameter.grad.add_(gradient)
                continue
            gradient = parameter.grad + gradient
            if gradient.device.type == "cpu" and not gradient.is_sparse:  # where memory for a new sum costs time
                sums[parameter] = gradient
        elif not gradient.is_sparse and storage_id(gradient) in taken:
            gradient = gradient.clone()
        if not gradient.is_sparse:
            taken.add(storage_id(gradient))
        parameter.grad = gradient


def set_zero_gradients(parameters: Iterable[nn.Parameter], modules: Sequence[nn.Module]) -> None:
    """Give every trained parameter a gradient of zero, sparse where its gradients are sparse.

    Args:
        parameters: The parameters of a stage.
        modules: All modules of the stage.
    """
    sparse = _sparse(modules)
    for parameter in parameters:
        zero = _no_rows if parameter in sparse else torch.zeros_like
        parameter.grad = zero(parameter) if parameter.requires_grad else None


def _sparse(modules: Sequence[nn.Module]) -> set[Tensor]:
    """Return the parameters of embeddings with sparse gradients, which some optimizers require."""
    tables = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    others = {p for m in modules if m not in tables for p in m._parameters.values() if p is not None}
    return {m.weight for m in tables} - others


def _no_rows(table: Tensor) -> Tensor:
    """Return a sparse gradient of zero."""
    indices, rows = table.new_zeros((1, 0), dtype=torch.long), table.new_zeros((0, *table.shape[1:]))
    return torch.sparse_coo_tensor(indices, rows, table.shape, check_invariants=True)
