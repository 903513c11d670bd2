"""Several optimizers that act as one."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers with parameters of their own, as one: for example Muon for matrices and AdamW for the rest.

    Its parameter groups are those of all of them, so one learning-rate scheduler works on all.

    Args:
        optimizers: The optimizers.

    Raises:
        ValueError: If two of them have the same parameter.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        held: set[Tensor] = set()
        for optimizer in self.optimizers:
            own = {p for group in optimizer.param_groups for p in group["params"]}
            if own & held:
                raise ValueError(
                    f"a parameter of shape {tuple(next(iter(own & held)).shape)} is in two optimizers: "
                    "give every parameter to one of them"
                )
            held |= own
        # Not the constructor of the base class, which makes groups and a state of its own.
        self.defaults: dict[str, Any] = {}
        for name in ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre"):
            setattr(self, f"_optimizer_{name}_hooks", OrderedDict())
        self._optimizer_load_state_dict_post_hooks: OrderedDict[int, Any] = OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The states of all parameters; changing an entry changes that of its optimizer."""
        return defaultdict(dict, {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters.

        Args:
            closure: Computes the loss again, once for all optimizers.

        Returns:
            The loss of the closure, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients.

        Args:
            set_to_none: Remove gradients instead of setting them to zero.
        """
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a further group, because it is unclear whose it is.

        Args:
            param_group: The group.

        Raises:
            ValueError: Always.
        """
        raise ValueError("a CombinedOptimizer takes no further groups: add the group to one of its optimizers")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the same optimizers.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: If the number of groups differs.
        """
        groups, start = state_dict["param_groups"], 0
        if len(groups) != len(self.param_groups):
            raise ValueError(f"the state has {len(groups)} parameter groups, but there are {len(self.param_groups)}")
        for optimizer in self.optimizers:
            own = groups[start : start + len(optimizer.param_groups)]
            start += len(own)
            states = {i: state_dict["state"][i] for group in own for i in group["params"] if i in state_dict["state"]}
            optimizer.load_state_dict({"state": states, "param_groups": own})


def optimizers_of(optimizer: torch.optim.Optimizer | None) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that make up one.

    Args:
        optimizer: An optimizer, a combined one, or None.

    Returns:
        The optimizers of a combined one, or the optimizer itself; none for None.
    """
    if optimizer is None:
        return ()
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,)
