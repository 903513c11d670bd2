"""Builds stages: for the trainer, shape inference, memory estimates and profiles alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petra.corrections import PeakLearningRates, StageCorrections
from petra.methods import Method, Settings, StageLayers
from petra.pipeline.stage import Loss, Stage

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer | None]
MakeScheduler = Callable[[torch.optim.Optimizer | None], torch.optim.lr_scheduler.LRScheduler | None]
MakeCorrections = Callable[
    [list[nn.Parameter], torch.optim.Optimizer | None, int], tuple[StageCorrections | None, PeakLearningRates | None]
]


@dataclass(frozen=True)
class StageBuilder:
    """Everything that the stages of a network have in common, whatever the cut."""

    layers: Sequence[nn.Module]
    """All layers of the network, in order."""
    method: Method
    settings: Settings
    """How layers are evaluated."""
    loss: Loss | None = None
    """The loss of the last stage."""
    optimizer: MakeOptimizer | None = None
    """Creates the optimizer of a stage from all its parameters; without it, stages have none."""
    scheduler: MakeScheduler | None = None
    """Creates the learning-rate scheduler of an optimizer."""
    corrections: MakeCorrections | None = None
    """Creates the corrections of a stage from its parameters, optimizer and index."""
    clip_norm: float | None = None
    """The largest norm of the gradient of a stage."""
    average: Callable[[Sequence[Tensor]], None] | None = None
    """Replaces tensors by their mean over replicas."""

    def stage_layers(self, cut: range, last: bool) -> StageLayers:
        """Return the layers of a stage.

        Args:
            cut: The indices of its layers.
            last: Whether it is the last stage.

        Returns:
            The layers, with the first layer above them.
        """
        above = None if last else self.layers[cut.stop]
        return StageLayers([self.layers[i] for i in cut], cut.start, self.settings, above)

    def build(self, index: int, count: int, cut: range, synthesizer: bool = True) -> Stage:
        """Build one stage.

        Args:
            index: Its index.
            count: The number of stages.
            cut: The indices of its layers.
            synthesizer: Whether it gets the synthesizer of the method, if the method has one.

        Returns:
            The stage.
        """
        last = index == count - 1
        layers = self.stage_layers(cut, last)
        parameters = layers.parameters()
        optimizer = None if self.optimizer is None else self.optimizer(parameters)
        scheduler = None if self.scheduler is None else self.scheduler(optimizer)  # may set the first learning rate
        corrections, peak_lrs = (
            (None, None) if self.corrections is None else self.corrections(parameters, optimizer, index)
        )
        return Stage(
            index,
            count,
            layers,
            self.method,
            optimizer,
            scheduler=scheduler,
            loss=self.loss if last else None,
            clip_norm=self.clip_norm,
            sends_streams=cut.start > 0 and self._needs_outputs(cut.start - 1),
            average=self.average,
            corrections=corrections,
            peak_lrs=peak_lrs,
            synthesizer=self.method.synthesizer(layers) if synthesizer and not last else None,
        )

    def _needs_outputs(self, layer: int) -> bool:
        """Return whether a stage that ends with this layer starts its backward from its outputs."""
        return self.method.needs_outputs(StageLayers([self.layers[layer]], layer, self.settings))
