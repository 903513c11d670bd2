"""Learning rates in the memory of the device, where a recorded update reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from petra.execution.refusal import groups_of
from petra.execution.stage import Stage


class Rates:
    """The learning rate of every group of every stage's optimizer, as of the last `refresh`."""

    def __init__(self, stages: Sequence[Stage], device: torch.device) -> None:
        self._stages = stages
        self._shown = self._now()
        dtype = torch.float32 if device.type == "cuda" else torch.float64  # which is what fused optimizers read
        self.table = torch.tensor(self._shown, dtype=dtype, device=device)

    def refresh(self) -> None:
        """Bring them up to date."""
        now = self._now()
        if now != self._shown:
            # Pinned memory is not used again before the copy is done, for which the host does not wait.
            fresh = torch.tensor(now, dtype=self.table.dtype, pin_memory=self.table.is_cuda)
            self.table.copy_(fresh, non_blocking=True)
            self._shown = now

    def _now(self) -> list[float]:
        # A group is looked for anew, for an optimizer makes other dictionaries when it loads a state.
        return [float(group["lr"]) * _factor(stage) for stage in self._stages for group in groups_of(stage)]


def _factor(stage: Stage) -> float:
    return 1.0 if stage.corrected is None else stage.corrected.site.rate
