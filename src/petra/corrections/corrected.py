"""The corrections of one stage together: counts how late gradients are, and has each correction do its part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from petra.corrections.correction import Correction, Site, Weights


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
    ) -> None:
        assert in_flight > 0
        self.corrections = list(corrections)
        self.site = Site(parameters, optimizer, in_flight / accumulate)
        self._accumulate = accumulate
        self._began: dict[int, int] = {}  # micro-batch in flight -> updates before its forward
        self._blank = blank  # updates with gradients of zero that are still to come
        self._set_rate()

    def before_forward(self, microbatch: int, accumulated: int) -> tuple[int, Weights | None]:
        """The delay that the micro-batch will have, and the weights of its forward, None for the current ones.

        ``accumulated`` is how many backwards there have been since the last update. Those of the micro-batches in
        flight come before that of this one, and every k-th of all these brings an update.
        """
        delay = (accumulated + len(self._began)) // self._accumulate + self._blank
        self._began[microbatch] = self.site.updates
        return delay, self._only(c.forward_weights(self.site, delay) for c in self.corrections if delay)

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
        rates = [group["lr"] for group in site.optimizer.param_groups]
        needs_old = any(c.needs_old for c in self.corrections)
        old = [p.detach().clone() for p, _ in site.groups()] if needs_old else []
        try:
            if site.rate != 1:
                for group in site.optimizer.param_groups:
                    group["lr"] = group["lr"] * site.rate
            site.optimizer.step()
            for correction in self.corrections:
                correction.change_step(site, old)
        finally:
            for group, rate in zip(site.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate  # the very one: schedulers go on from it
        for correction in self.corrections:
            correction.see_step(site, old)
        site.updates += 1
        self._set_rate()

    def tensors(self) -> list[Tensor]:
        """What is kept between updates."""
        return [value for state in self.site.state.values() for value in state.values()]

    def state_dict(self) -> dict[str, Any]:
        """What is kept, with parameters themselves as keys."""
        state = {p: dict(values) for p, values in self.site.state.items()}
        return {"state": state, "began": dict(self._began), "blank": self._blank}

    def load_state_dict(self, state: dict[str, Any], updates: int) -> None:
        """Take up what `state_dict` gave after so many updates."""
        self.site.state = {p: dict(values) for p, values in state["state"].items()}
        self._began, self._blank = dict(state["began"]), state.get("blank", 0)
        self.site.updates = updates
        self._set_rate()

    def _set_rate(self) -> None:
        self.site.rate = prod(c.rate(self.site) for c in self.corrections)

    @staticmethod
    def _only(found: Iterable[Weights | None]) -> Weights | None:
        weights = [w for w in found if w is not None]
        assert len(weights) <= 1, "two corrections that set the same weights"
        return weights[0] if weights else None
