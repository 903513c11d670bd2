"""Optimizers as in the papers: weight decay applies to matrices, not to norms and biases.

On a GPU they are fused, or of `petra.optim`: an update is a few kernels, and can be captured.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from petra.formatting import first_line
from petra.optim import SOAP, AdamWBF16, Muon, NAdamW, muon_groups

ADAPTIVE = ("adamw", "nadamw", "muon", "soap")
OPTIMIZERS = ("sgd", *ADAPTIVE)
STATES = ("float32", "bf16", "8bit")
"""The dtypes of AdamW's moments."""


def sgd(
    parameters: Sequence[nn.Parameter],
    *,
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = True,
    weight_decay: float = 0.0,
) -> torch.optim.SGD:
    """SGD with Nesterov momentum and no weight decay on norms and biases (Goyal et al., 2017)."""
    groups, fused = parameter_groups(parameters, weight_decay), _fused(parameters)
    return torch.optim.SGD(groups, lr, momentum=momentum, nesterov=nesterov and momentum > 0, fused=fused)


def adamw(
    parameters: Sequence[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    state: str = "float32",
) -> torch.optim.Optimizer:
    """AdamW with no weight decay on norms and biases; its moments are in one of the `STATES`."""
    groups = parameter_groups(parameters, weight_decay)
    if state == "bf16":
        return AdamWBF16(groups, lr, betas=betas)
    if state == "8bit":
        return adamw_8bit()(groups, lr, betas=betas)  # type: ignore[no-any-return]
    return torch.optim.AdamW(groups, lr, betas=betas, fused=_fused(parameters))


def check_state(optimizer: str, state: str) -> None:
    """Check that an optimizer can keep its moments in one of the `STATES`.

    Args:
        optimizer: The name of the optimizer.
        state: The name of the dtype.

    Raises:
        ValueError: If it cannot.
    """
    if state != "float32" and optimizer != "adamw":
        raise ValueError(
            f"--optimizer-state {state} is for adamw, not for {optimizer}: add --optimizer adamw, or leave it out"
        )
    if state == "8bit":
        adamw_8bit()


def adamw_8bit() -> Any:
    """Return the class `AdamW8bit` of torchao, a package that is not always installed.

    Raises:
        ValueError: If it is not.
    """
    try:
        return import_module("torchao.optim").AdamW8bit
    except ImportError as error:
        raise ValueError(
            f"8-bit moments need torchao ({first_line(error)}): pip install torchao, or use --optimizer-state bf16"
        ) from error


def nadamw(
    parameters: Sequence[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float] = (0.99, 0.999),
    weight_decay: float = 0.0,
) -> NAdamW:
    """NAdam with decoupled weight decay, not on norms and biases; momentum near 1 makes it tolerate delays.

    Ajanthan et al., "Nesterov Method for Asynchronous Pipeline Parallel Optimization", 2025.
    """
    return NAdamW(parameter_groups(parameters, weight_decay), lr, betas=betas)


def muon(
    parameters: Sequence[nn.Parameter],
    *,
    lr: float,
    hidden: Container[Tensor],
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
) -> Muon:
    """Muon for the ``hidden`` matrices and AdamW for the others, with no weight decay on norms and biases."""
    return Muon(muon_groups(parameters, hidden, weight_decay), lr, momentum=momentum, betas=betas)


def soap(
    parameters: Sequence[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float] = (0.95, 0.95),
    weight_decay: float = 0.0,
) -> SOAP:
    """SOAP with no weight decay on norms and biases, which are updated by AdamW."""
    return SOAP(parameter_groups(parameters, weight_decay), lr, betas=betas)


def base_learning_rate(batch_size: int, accumulate: int) -> float:
    """Return the PETRA paper's learning rate for SGD: 0.1 for 256 samples per update, in proportion to their number."""
    return 0.1 * batch_size * accumulate / 256


def _fused(parameters: Sequence[nn.Parameter]) -> bool | None:
    """Return whether the optimizer of these parameters is fused; None leaves it to PyTorch."""
    return True if all(p.is_cuda and p.is_floating_point() for p in parameters) else None


def parameter_groups(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return one group with weight decay, and one without it for norms, biases and other vectors."""
    decayed = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
