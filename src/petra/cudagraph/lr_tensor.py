"""Learning rates in device memory, where a captured update reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from petra.cudagraph.eligibility import groups_of
from petra.pipeline.stage import Stage


class LearningRateTensor:
    """The learning rate of every parameter group of every stage, as of the last `refresh`.

    Args:
        stages: The stages.
        device: The device.
    """

    def __init__(self, stages: Sequence[Stage], device: torch.device) -> None:
        self._stages = stages
        self._shown = self._now()
        dtype = torch.float32 if device.type == "cuda" else torch.float64  # which is what fused optimizers read
        self.table = torch.tensor(self._shown, dtype=dtype, device=device)

    def refresh(self) -> None:
        """Copy the current learning rates to the device if they have changed."""
        now = self._now()
        if now != self._shown:
            # The allocator does not reuse pinned memory before the copy is done, so the host need not wait for it.
            fresh = torch.tensor(now, dtype=self.table.dtype, pin_memory=self.table.is_cuda)
            self.table.copy_(fresh, non_blocking=True)
            self._shown = now

    def _now(self) -> list[float]:
        # Groups are looked up every time, because an optimizer creates new ones when it loads a state.
        return [float(group["lr"]) * _factor(stage) for stage in self._stages for group in groups_of(stage)]


def _factor(stage: Stage) -> float:
    return 1.0 if stage.corrections is None else stage.corrections.context.lr_factor
