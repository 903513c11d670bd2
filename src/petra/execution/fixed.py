"""What a recorded tick takes for granted: the modes of modules, and where that which is trained lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from petra.execution.stage import Stage


class Fixed:
    """Looks at it. The host does so at every tick, so modules are not searched for anew every time."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._modules = [m for stage in stages for layer in stage.chain.layers for m in layer.modules()]
        self._buffers = [m._buffers for m in self._modules if m._buffers]
        self._parameters = [p for stage in stages for p in stage.parameters]

    def __call__(self) -> Any:
        """The same as before as long as nothing has changed."""
        modes = [module.training for module in self._modules]
        places = [b.data_ptr() for buffers in self._buffers for b in buffers.values() if b is not None]
        places += [p.data_ptr() for p in self._parameters]
        for stage in self._stages:
            if stage.optimizer is not None:
                states = stage.optimizer.state.values()
                places += [v.data_ptr() for state in states for v in state.values() if isinstance(v, Tensor)]
            if stage.synthesizer is not None:
                places += [v.data_ptr() for v in stage.synthesizer.tensors()]
            if stage.corrected is not None:
                places += [v.data_ptr() for v in stage.corrected.tensors()]
        return modes, places
