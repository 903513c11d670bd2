"""The corrections of one stage together: counts how late gradients are, and has each correction do its part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import log2, prod
from typing import Any

import torch
from torch import Tensor, nn

from petra.corrections.correction import Correction, Site, Weights
from petra.corrections.peaks import Peaks
from petra.corrections.rates import rates


class Corrected:
    """What a stage with ``in_flight`` = n > 0 micro-batches between forward and backward asks its corrections.

    With an update every k = ``accumulate`` backwards, floor(m/k) updates precede the backward of micro-batch m, and
    floor((m-n)/k) its forward once the pipeline is full. Their difference is the *delay* d of the micro-batch, which
    is n/k rounded down or up; its mean over k in a row is exactly τ = n/k. ``blank`` updates come before the first
    backward.
    """

    def __init__(
        self,
        corrections: Sequence[Correction],
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        in_flight: int,
        accumulate: int,
        blank: int = 0,
        peaks: Peaks | None = None,
    ) -> None:
        assert in_flight > 0
        self.corrections = list(corrections)
        self.site = Site(parameters, optimizer, in_flight / accumulate, accumulate)
        self._accumulate = accumulate
        self._began: dict[int, int] = {}  # micro-batch in flight -> updates before its forward
        self._blank = blank  # updates with gradients of zero that are still to come
        self._peaks = Peaks(optimizer) if peaks is None else peaks
        self.see_rate()

    def before_forward(self, microbatch: int, accumulated: int) -> tuple[int, Weights | None]:
        """The delay that the micro-batch will have, and the weights of its forward, None for the current ones.

        ``accumulated`` is how many backwards there have been since the last update. Those of the micro-batches in
        flight come before that of this one, and every k-th of all these brings an update.
        """
        delay = (accumulated + len(self._began)) // self._accumulate + self._blank
        self._began[microbatch] = self.site.updates
        return delay, self._only(c.forward_weights(self.site, delay) for c in self.corrections if delay)

    @property
    def predicts(self) -> bool:
        """Whether forwards may have other weights than the current ones."""
        return any(type(c).forward_weights is not Correction.forward_weights for c in self.corrections)

    def settings(self) -> list[Any]:
        """All but the weights themselves that predictions depend on, which may change between two updates."""
        found = [value for g in self.site.optimizer.param_groups for key, value in g.items() if key != "params"]
        groups = [value.item() if isinstance(value, Tensor) else value for value in found]
        return [self.site.rate, self.site.memory, groups, [p.requires_grad for p in self.site.parameters]]

    def before_backward(self, microbatch: int) -> Weights | None:
        """The weights of the backward, None for the current ones."""
        delay = self.site.updates - self._began.pop(microbatch)
        return self._only(c.backward_weights(self.site, delay) for c in self.corrections if delay)

    def skip(self) -> None:
        """The next update is one with gradients of zero, before the first backward."""
        self._blank = max(0, self._blank - 1)

    def change_gradients(self) -> None:
        """Before gradients are clipped."""
        for correction in self.corrections:
            correction.change_gradients(self.site)

    def step(self) -> None:
        """In place of the optimizer's own."""
        site = self.site
        needs_old = any(c.needs_old for c in self.corrections)
        old = [p.detach().clone() for p, _ in site.groups()] if needs_old else []
        replaced = any(c.replaces_step for c in self.corrections)
        with rates(site.optimizer, site.rate), _momenta(site):
            with _without_look_ahead(site.optimizer) if replaced else nullcontext():
                site.optimizer.step()
            for correction in self.corrections:
                correction.change_step(site, old)
        for correction in self.corrections:
            correction.see_step(site, old)
        self._count()

    @property
    def ages(self) -> list[int]:
        """How many updates there have been since the forward of each micro-batch in flight."""
        return [self.site.updates - began for _, began in sorted(self._began.items())]

    def advance(self, update: bool) -> None:
        """What a tick of a full pipeline does to the numbers, where a replay has done the rest."""
        self._began[max(self._began) + 1] = self.site.updates
        del self._began[min(self._began)]
        if update:
            self._count()

    def tensors(self) -> list[Tensor]:
        """What is kept between updates."""
        return [value for state in self.site.state.values() for value in state.values()]

    def state_dict(self) -> dict[str, Any]:
        """What is kept, with parameters themselves as keys."""
        state = {p: dict(values) for p, values in self.site.state.items()}
        return {"state": state, "began": dict(self._began), "blank": self._blank}

    def load_state_dict(self, state: dict[str, Any], updates: int) -> None:
        """Take up what `state_dict` gave after so many updates."""
        self.site.state = {p: {k: v.clone() for k, v in values.items()} for p, values in state["state"].items()}
        self._began, self._blank = dict(state["began"]), state.get("blank", 0)
        self.site.updates = updates
        self.see_rate()

    def _count(self) -> None:
        self.site.updates += 1
        self.set_rate()

    def see_rate(self) -> None:
        """Look at the learning rate and the momentum that a scheduler, or who ever it was, has set for the next update.

        What goes with the learning rate goes in powers of two: a momentum is a part of recorded updates, and each
        change has to be recorded anew.
        """
        site = self.site
        self._peaks.see()
        rate, site.highest = float(site.group().get("lr", 0.0)), self._peaks.of(site.group())
        site.fall = 2.0 ** round(log2(rate / site.highest)) if rate > 0 else float(site.highest == 0)
        site.memory = max((c.memory(site) for c in self.corrections), default=0.0)
        self.set_rate()

    def set_rate(self) -> None:
        """Work out what the next update's learning rate is multiplied by."""
        self.site.rate = prod(c.rate(self.site) for c in self.corrections)

    @staticmethod
    def _only(found: Iterable[Weights | None]) -> Weights | None:
        weights = [w for w in found if w is not None]
        assert len(weights) <= 1, "two corrections that set the same weights"
        return weights[0] if weights else None


@contextmanager
def _momenta(site: Site) -> Iterator[None]:
    """Inside, the optimizer has the momentum of `Site.momentum`."""
    kept = [(group, group["momentum"]) for group in site.optimizer.param_groups] if site.memory else []
    try:
        for group, _ in kept:
            group["momentum"] = site.momentum(group)
        yield
    finally:
        for group, momentum in kept:
            group["momentum"] = momentum


@contextmanager
def _without_look_ahead(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, SGD has momentum as always, and no Nesterov's step, which it may write into gradients that are needed."""
    kept = [(group, group["nesterov"]) for group in optimizer.param_groups if "nesterov" in group]
    try:
        for group, _ in kept:
            group["nesterov"] = False
        yield
    finally:
        for group, nesterov in kept:
            group["nesterov"] = nesterov
