"""Notices weights that are not what they were when a run was evaluated first."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from petra.reversible.modules import held_tensors, submodules
from petra.reversible.statistics import normalisations

Versions = list[tuple[Tensor, int]]

CHANGED = (
    "a parameter or buffer of a reversible layer was changed between forward and backward: inputs can only be "
    "reconstructed with the weights of the forward pass, so step the optimizer after backward"
)
_OTHERS = (
    "a reversible layer has other parameters backward than it had forward, or other buffers "
    "(torch.func.functional_call?): inputs can only be reconstructed with the weights of the forward pass, so use "
    "petra.plain_autograd() around such calls"
)
_STATE = (
    "a residual function changes a buffer of its own whenever it runs (spectral norm?), and in a reversible layer it "
    "runs once forward and once backward: leave that out, or use petra.plain_autograd()"
)


def versions(modules: Sequence[nn.Module]) -> Versions:
    """All parameters, and all buffers on which outputs depend, as they are now.

    A batch norm in training mode does not read its running statistics, so they may go on.
    """
    going_on = {m for m in normalisations(modules) if m.training}
    parts = submodules(modules)
    held = (t for m in parts for t in (*m._parameters.values(), *(() if m in going_on else m._buffers.values())))
    return [(tensor, tensor._version) for tensor in held if tensor is not None and not tensor.is_inference()]


def check_unchanged(modules: Sequence[nn.Module], then: Versions) -> None:
    """Raise unless the modules have the weights that they had ``then``."""
    if _replaced(modules, then):
        raise RuntimeError(_OTHERS)
    if any(tensor._version != version for tensor, version in then):
        raise RuntimeError(CHANGED)


def check_stateless(modules: Sequence[nn.Module], then: Versions) -> None:
    """Raise if evaluating the modules again has changed them."""
    if _replaced(modules, then) or any(tensor._version != version for tensor, version in then):
        raise RuntimeError(_STATE)


def _replaced(modules: Sequence[nn.Module], then: Versions) -> bool:
    """Whether any of the tensors is no longer there."""
    held = {id(tensor) for tensor in held_tensors(modules)}
    return any(id(tensor) not in held for tensor, _ in then)
