"""Clips gradients by their norm over all stages.

With an exact schedule, all stages make the same update, and no stage needs its new weights before the last one has all
its gradients. So updates wait for each other: the norm is that of the whole network, as in
`torch.nn.utils.clip_grad_norm_`.

Otherwise, a stage would wait for stages that update at other times. It combines its own current norm with the norms of
the last updates that the other stages made J or more ticks ago, for J stages. A message needs at most J ticks from any
stage to any other, so ranks do not wait for norms either, and one process and any number of ranks compute the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from petra.pipeline.stage import Stage

Number = float | Tensor


class NormExchange(Protocol):
    """The collective operations that global clipping needs."""

    def gather_norms(self, norms: dict[int, Number]) -> dict[int, Number]:
        """Return the squared norms of all stages, from those of this process. All ranks call it.

        Args:
            norms: The squared norms of the stages of this process.

        Returns:
            The squared norms of all stages.
        """

    def send_norms(self, norms: Sequence[Number]) -> Callable[[], Sequence[Number]]:
        """Start to combine lists of squared norms, in which stages of other ranks have 0. All ranks call it.

        Args:
            norms: A squared norm for every stage.

        Returns:
            A function that waits for the largest value of every entry.
        """


class LocalExchange:
    """All stages are in this process."""

    def gather_norms(self, norms: dict[int, Number]) -> dict[int, Number]:
        return norms

    def send_norms(self, norms: Sequence[Number]) -> Callable[[], Sequence[Number]]:
        return lambda: norms


class GlobalClipping:
    """Clips the gradient of the whole network.

    Args:
        max_norm: The largest norm.
        stages: The number of stages of the pipeline.
        exact: Whether all stages update together.
        exchange: Connects the ranks; by default, all stages are in this process.
    """

    def __init__(self, max_norm: float, stages: int, exact: bool, exchange: NormExchange | None = None) -> None:
        self.max_norm, self._stages, self._exact = max_norm, stages, exact
        self._exchange: NormExchange = exchange if exchange is not None else LocalExchange()
        self._prepared: list[Stage] = []  # stages of this process whose update waits for the others
        self._announced = 0  # updates of all stages since the last common one
        self._latest: dict[int, Number] = {}
        self._known: Sequence[Number] = [0.0] * stages
        self._pending: deque[Callable[[], Sequence[Number]]] = deque()

    def begin_tick(self) -> None:
        """Send the norms of the tick before, and receive those of J ticks ago."""
        if self._exact:
            return
        self._pending.append(self._exchange.send_norms([self._latest.get(s, 0.0) for s in range(self._stages)]))
        if len(self._pending) > self._stages:
            self._known = self._pending.popleft()()

    def update(self, stage: Stage) -> None:
        """Update a stage of this process, now or as soon as the norm is known.

        Args:
            stage: The stage, with the gradients of its update.
        """
        stage.prepare_update()
        own = squared_norm(stage.parameters)
        self._latest[stage.index] = own
        if self._exact:
            self._prepared.append(stage)
            self.announce()
            return
        norms = [own if s == stage.index else self._known[s] for s in range(self._stages)]
        self._apply(stage, norms)

    def announce(self) -> None:
        """Count an update of any stage; with the last one of them, those that wait are made."""
        if not self._exact:
            return
        self._announced += 1
        if self._announced < self._stages:
            return
        found = self._exchange.gather_norms({stage.index: self._latest[stage.index] for stage in self._prepared})
        norms = [found[s] for s in range(self._stages)]
        for stage in self._prepared:
            self._apply(stage, norms)
        self._prepared, self._announced = [], 0

    def waits(self, stage: Stage) -> bool:
        """Return whether an update of the stage waits for the norm.

        Args:
            stage: The stage.

        Returns:
            True if its weights are not current.
        """
        return stage in self._prepared

    def _apply(self, stage: Stage, norms: Sequence[Number]) -> None:
        gradients = [p.grad for p in stage.parameters if p.grad is not None]
        if gradients:
            total: Number = 0.0
            for norm in norms:  # in the order of the stages, so that the sum does not depend on the ranks
                total = total + norm
            root = torch.as_tensor(total, dtype=torch.float64).sqrt()
            root = root.to(gradients[0].device, gradients[0].dtype)
            nn.utils.clip_grads_with_norm_(stage.parameters, self.max_norm, root)
        stage.apply_update()

    def state_dict(self) -> dict[str, Any]:
        """Return the norms of other stages that are known or on their way.

        Returns:
            Plain numbers; the norm of each stage is saved with the stage.
        """
        assert not self._prepared
        pending = [finish() for finish in self._pending]
        self._pending = deque(lambda norms=norms: norms for norms in pending)  # type: ignore[misc]
        return {"known": _numbers(self._known), "pending": [_numbers(norms) for norms in pending]}

    def latest(self, stage: int) -> float:
        """Return the squared norm of the last update of a stage of this process.

        Args:
            stage: The index of the stage.

        Returns:
            The squared norm; 0 before the first update.
        """
        return float(self._latest.get(stage, 0.0))

    def load_state_dict(self, state: dict[str, Any] | None, latest: dict[int, float]) -> None:
        """Continue from a state.

        Args:
            state: What `state_dict` returned; None starts without norms.
            latest: The squared norm of the last update of each stage of this process.
        """
        self._prepared, self._announced, self._latest = [], 0, dict(latest)
        self._known = [0.0] * self._stages if state is None else list(state["known"])
        pending = [] if state is None else [list(norms) for norms in state["pending"]]
        self._pending = deque(lambda norms=norms: norms for norms in pending)  # type: ignore[misc]


def squared_norm(parameters: Sequence[nn.Parameter]) -> Number:
    """Return the squared norm of the gradients of some parameters.

    Args:
        parameters: The parameters.

    Returns:
        A float64 on their device; 0 if there is no gradient.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    return nn.utils.get_total_norm(gradients).double().square() if gradients else 0.0


def _numbers(norms: Sequence[Number]) -> list[float]:
    return [float(norm) for norm in norms]
