"""All corrections of one stage: measures how late gradients are, and applies each correction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import log2, prod
from typing import Any

import torch
from torch import Tensor, nn

from petra.corrections.correction import Correction, StageContext, Weights
from petra.corrections.learning_rates import PeakLearningRates, scaled_learning_rates
from petra.schedule import Action, Kind


class StageCorrections:
    """Applies the corrections of a stage with n > 0 micro-batches between forward and backward.

    With an update after every k-th backward, floor(m/k) updates precede the backward of micro-batch m and, once the
    pipeline is full, floor((m-n)/k) updates precede its forward. The difference is the *delay* d of the micro-batch:
    n/k, rounded down or up. Its mean over k consecutive micro-batches is exactly τ = n/k.

    Args:
        corrections: The corrections.
        parameters: All parameters of the stage.
        optimizer: The optimizer of the stage.
        in_flight: n.
        accumulate: k.
        zero_gradient_updates: The number of updates with zero gradients before the first backward.
        peak_lrs: The highest learning rates so far; None starts with the current ones.
        staleness: τ as a function of the updates so far, if it changes in the course of training; by default n/k.
            While it is 0, nothing is corrected.
    """

    def __init__(
        self,
        corrections: Sequence[Correction],
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        in_flight: int,
        accumulate: int,
        zero_gradient_updates: int = 0,
        peak_lrs: PeakLearningRates | None = None,
        staleness: Callable[[int], float] | None = None,
    ) -> None:
        assert in_flight > 0
        self._staleness = (lambda updates: in_flight / accumulate) if staleness is None else staleness
        self.corrections = list(corrections)
        self.context = StageContext(parameters, optimizer, self._staleness(0), accumulate)
        self._accumulate = accumulate
        self._updates_before: dict[int, int] = {}  # micro-batch in flight -> updates before its forward
        self._zero_gradient_updates = zero_gradient_updates  # those that are still to come
        self._peaks = PeakLearningRates(optimizer) if peak_lrs is None else peak_lrs
        self.observe_lr()

    def before_forward(self, microbatch: int, accumulated: int) -> tuple[int, Weights | None]:
        """Return the delay of a micro-batch and the weights of its forward.

        The backwards of the micro-batches in flight precede the backward of this one. Together with those accumulated
        since the last update, every k-th of them brings an update.

        Args:
            microbatch: The number of the micro-batch.
            accumulated: The number of backwards since the last update.

        Returns:
            The delay, and a value for each parameter or None for the current weights.
        """
        delay = (accumulated + len(self._updates_before)) // self._accumulate + self._zero_gradient_updates
        self._updates_before[microbatch] = self.context.updates
        return delay, self._only(c.forward_weights(self.context, delay) for c in self.corrections if delay)

    @property
    def predicts(self) -> bool:
        """True if forwards may use other weights than the current ones."""
        return any(type(c).forward_weights is not Correction.forward_weights for c in self.corrections)

    def prediction_settings(self) -> list[Any]:
        """Return everything besides the weights that predictions depend on and that may change between two updates.

        Returns:
            Values that can be compared with those of another time.
        """
        values = [value for g in self.context.optimizer.param_groups for key, value in g.items() if key != "params"]
        groups = [value.item() if isinstance(value, Tensor) else value for value in values]
        return [
            self.context.lr_factor,
            self.context.momentum_horizon,
            groups,
            [p.requires_grad for p in self.context.parameters],
        ]

    def before_backward(self, microbatch: int) -> Weights | None:
        """Return the weights of a backward.

        Args:
            microbatch: The number of the micro-batch.

        Returns:
            A value for each parameter, or None for the current weights.
        """
        delay = self.context.updates - self._updates_before.pop(microbatch)
        return self._only(c.backward_weights(self.context, delay) for c in self.corrections if delay)

    def count_zero_gradient_update(self) -> None:
        """Count an update with zero gradients before the first backward. Call it before `step`."""
        self._zero_gradient_updates = max(0, self._zero_gradient_updates - 1)

    @property
    def active(self) -> list[Correction]:
        """The corrections; none while gradients are exact."""
        return self.corrections if self.context.staleness else []

    def change_gradients(self) -> None:
        """Let all corrections change the gradients. Call it before gradients are clipped."""
        for correction in self.active:
            correction.change_gradients(self.context)

    def step(self) -> None:
        """Make an optimizer step with all corrections. Call it instead of the optimizer's `step`."""
        context = self.context
        needs_old_weights = any(c.needs_old_weights for c in self.active)
        old = [p.detach().clone() for p, _ in context.trained_parameters()] if needs_old_weights else []
        replaced = any(c.replaces_step for c in self.active)
        with scaled_learning_rates(context.optimizer, context.lr_factor), _corrected_momentum(context):
            with _without_nesterov(context.optimizer) if replaced else nullcontext():
                context.optimizer.step()
            for correction in self.active:
                correction.change_step(context, old)
        for correction in self.active:
            correction.after_step(context, old)
        self._count_update()

    @property
    def delays_so_far(self) -> list[int]:
        """The number of updates since the forward of each micro-batch in flight, oldest first."""
        return [self.context.updates - before for _, before in sorted(self._updates_before.items())]

    def advance_counters(self, action: Action) -> None:
        """Count an action of the stage whose work a CUDA graph has done.

        Args:
            action: The action.
        """
        if action.kind is Kind.FORWARD:
            self._updates_before[action.microbatch] = self.context.updates
        elif action.kind is Kind.BACKWARD:
            del self._updates_before[action.microbatch]
        elif action.kind is Kind.UPDATE:
            self._count_update()

    def tensors(self) -> list[Tensor]:
        """Return all tensors that corrections keep between updates.

        Returns:
            The tensors of `context.state`.
        """
        return [value for state in self.context.state.values() for value in state.values()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all corrections.

        Returns:
            A dictionary for `load_state_dict`. The keys of its `state` are the parameters themselves.
        """
        state = {p: dict(values) for p, values in self.context.state.items()}
        return {
            "state": state,
            "updates_before": dict(self._updates_before),
            "zero_gradient_updates": self._zero_gradient_updates,
        }

    def load_state_dict(self, state: dict[str, Any], updates: int) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: The dictionary.
            updates: The number of updates that the stage had made.
        """
        self.context.state = {p: {k: v.clone() for k, v in values.items()} for p, values in state["state"].items()}
        self._updates_before, self._zero_gradient_updates = (
            dict(state["updates_before"]),
            state["zero_gradient_updates"],
        )
        self.context.updates = updates
        self.observe_lr()

    def host_state(self) -> Any:
        """Return what the host remembers between ticks, to undo a failed CUDA graph capture.

        Returns:
            Copies of the containers and counters. Tensors are referenced, not copied.
        """
        context = self.context
        state = {parameter: dict(values) for parameter, values in context.state.items()}
        return dict(self._updates_before), self._zero_gradient_updates, context.updates, context.lr_factor, state

    def load_host_state(self, state: Any) -> None:
        """Restore what `host_state` returned.

        Args:
            state: A return value of `host_state`. It stays usable.
        """
        updates_before, self._zero_gradient_updates, self.context.updates, self.context.lr_factor, values = state
        self._updates_before = dict(updates_before)
        self.context.state = {parameter: dict(inner) for parameter, inner in values.items()}

    def _count_update(self) -> None:
        self.context.updates += 1
        self.context.staleness = self._staleness(self.context.updates)
        self.update_lr_factor()

    def observe_lr(self) -> None:
        """Read the learning rate and momentum that the next update will use.

        What depends on the learning rate changes in powers of two: a captured update contains its momentum, and every
        change requires another capture.
        """
        context = self.context
        context.staleness = self._staleness(context.updates)
        self._peaks.observe()
        lr, context.peak_lr = float(context.main_group().get("lr", 0.0)), self._peaks.peak(context.main_group())
        context.lr_ratio = 2.0 ** round(log2(lr / context.peak_lr)) if lr > 0 else float(context.peak_lr == 0)
        context.momentum_horizon = max((c.momentum_horizon(context) for c in self.active), default=0.0)
        self.update_lr_factor()

    def update_lr_factor(self) -> None:
        """Compute the factor for the learning rate of the next update."""
        self.context.lr_factor = prod(c.lr_factor(self.context) for c in self.active)

    @staticmethod
    def _only(proposed: Iterable[Weights | None]) -> Weights | None:
        """Return the weights of the only correction that sets them, if any."""
        weights = [w for w in proposed if w is not None]
        assert len(weights) <= 1, "two corrections set the same weights"
        return weights[0] if weights else None


@contextmanager
def _corrected_momentum(context: StageContext) -> Iterator[None]:
    """Give the optimizer the momentum of `StageContext.momentum`."""
    original = (
        [(group, group["momentum"]) for group in context.optimizer.param_groups] if context.momentum_horizon else []
    )
    try:
        for group, _ in original:
            group["momentum"] = context.momentum(group)
        yield
    finally:
        for group, momentum in original:
            group["momentum"] = momentum


@contextmanager
def _without_nesterov(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Disable Nesterov momentum, because SGD may then overwrite gradients that a correction still needs."""
    original = [(group, group["nesterov"]) for group in optimizer.param_groups if "nesterov" in group]
    try:
        for group, _ in original:
            group["nesterov"] = False
        yield
    finally:
        for group, nesterov in original:
            group["nesterov"] = nesterov
