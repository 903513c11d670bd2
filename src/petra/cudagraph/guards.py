"""The assumptions of a captured tick: settings of modules and optimizers, and the addresses of trained tensors."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from petra.pipeline.stage import Stage

_NUMBERS = (bool, int, float, str)
"""Types of module attributes that a forward may read, such as a rate or a temperature."""

_PLAIN = (int, float, str, tuple, torch.dtype, type(None))
"""Types of optimizer settings that are constants in its kernels; its learning rate is in device memory."""


class Guards:
    """Reads the assumptions. The host does so in every tick, so modules are collected only once.

    Args:
        stages: The stages.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        losses = [stage.loss for stage in stages if isinstance(stage.loss, nn.Module)]
        owners = [*(layer for stage in stages for layer in stage.layers), *losses]
        modules = [m for owner in owners for m in owner.modules()]
        own = [vars(module) for module in modules]
        names = [[name for name, v in values.items() if type(v) in _NUMBERS] for values in own]
        self._attributes = [(itemgetter(*found), found, v) for found, v in zip(names, own, strict=True) if found]
        self._buffers = [m._buffers for m in modules if m._buffers]
        self._plain, self._tensors = Selection(*_PLAIN), Selection(Tensor)
        self._parameters = [p for stage in stages for p in stage.parameters]

    def __call__(self) -> Any:
        """Return a value that stays equal as long as nothing has changed."""
        modes: list[Any] = [p.requires_grad for p in self._parameters]
        try:
            modes += [read(values) for read, _, values in self._attributes]
        except KeyError:  # an attribute has been deleted
            modes += [[values.get(name) for name in names] for _, names, values in self._attributes]
        tensors: list[Any] = [*self._parameters]
        for buffers in self._buffers:
            tensors += buffers.values()
        settings: list[Any] = []
        contexts: list[float] = []
        for stage in self._stages:
            if stage.optimizer is not None:
                for group in stage.optimizer.param_groups:
                    settings += [v for name, v in group.items() if name != "lr"]
                for state in stage.optimizer.state.values():
                    tensors += state.values()
            if stage.synthesizer is not None:
                tensors += stage.synthesizer.tensors()
            if stage.corrections is not None:
                tensors += stage.corrections.tensors()
                contexts += [stage.corrections.context.momentum_horizon, stage.corrections.context.staleness]
        return modes, self._plain.of(settings), contexts, [x.data_ptr() for x in self._tensors.of(tensors)]


class Selection:
    """Those of a list of objects that are of some types, found again only if there are other objects in it.

    Args:
        types: The types.
    """

    def __init__(self, *types: type) -> None:
        self._types = types
        self._given: list[Any] = []
        self._selected: list[Any] = []

    def of(self, given: list[Any]) -> list[Any]:
        """Return the objects of these types.

        Args:
            given: All objects.

        Returns:
            Some of them.
        """
        if len(given) != len(self._given) or not all(map(is_, given, self._given)):
            self._given, self._selected = given, [x for x in given if isinstance(x, self._types)]
        return self._selected
