"""Detects weights that changed between the forward and the backward pass of a reversible segment."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from petra.reversible.module_state import held_tensors, normalisations, submodules

Versions = list[tuple[Tensor, int]]
"""Tensors, each with its version counter at the time of the forward pass."""

_CHANGED = (
    "a parameter or buffer of a reversible layer was changed between forward and backward: inputs can only be "
    "reconstructed with the weights of the forward pass, so step the optimizer after backward"
)
_REPLACED = (
    "a reversible layer has different parameters or buffers in the backward pass than in the forward pass "
    "(torch.func.functional_call?): inputs can only be reconstructed with the weights of the forward pass, so use "
    "petra.plain_autograd() around such calls"
)
_STATEFUL = (
    "a residual function changes one of its buffers in every evaluation (spectral norm?), but a reversible layer "
    "evaluates it twice, once forward and once backward: remove that part, or use petra.plain_autograd()"
)


def versions(modules: Sequence[nn.Module]) -> Versions:
    """Return all parameters, and all buffers on which outputs depend, with their version counters.

    A batch norm in training mode does not read its running statistics, so these may change.
    """
    updating = {m for m in normalisations(modules) if m.training}
    parts = submodules(modules)
    held = (t for m in parts for t in (*m._parameters.values(), *(() if m in updating else m._buffers.values())))
    return [(tensor, tensor._version) for tensor in held if tensor is not None and not tensor.is_inference()]


def check_unchanged(modules: Sequence[nn.Module], then: Versions) -> None:
    """Raise `RuntimeError` unless the modules still have the weights recorded in `then`."""
    if _replaced(modules, then):
        raise RuntimeError(_REPLACED)
    if any(tensor._version != version for tensor, version in then):
        raise RuntimeError(_CHANGED)


def check_stateless(modules: Sequence[nn.Module], then: Versions) -> None:
    """Raise `RuntimeError` if evaluating the modules again has changed them."""
    if _replaced(modules, then) or any(tensor._version != version for tensor, version in then):
        raise RuntimeError(_STATEFUL)


def _replaced(modules: Sequence[nn.Module], then: Versions) -> bool:
    """Return whether any of the tensors no longer belongs to the modules."""
    held = {id(tensor) for tensor in held_tensors(modules)}
    return any(id(tensor) not in held for tensor, _ in then)
