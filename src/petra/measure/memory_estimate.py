"""Predicts the memory of one rank, by running its stages on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from petra.measure.stage_memory import MemoryProbe, StageMemory
from petra.methods import BackwardMessage, Method, Settings, StageLayers
from petra.pipeline import Executor, LocalMailbox, MessageFormat, ShapeInference, Stage, StageBuilder
from petra.pipeline.fast_meta import FastMetaOperations
from petra.pipeline.message_layout import Template
from petra.pipeline.message_shapes import as_message, shapes_of
from petra.pipeline.optimizer_factory import OptimizerFactory, create_optimizer
from petra.pipeline.stage import Loss
from petra.reversible.storage import set_storage
from petra.reversible.streams import Streams, channels_last
from petra.schedule import Action, Kind, PipelineSchedule


class MemoryEstimator:
    """Predicts the memory of stages of a network, for any cut.

    Args:
        layers: The layers of the network; they are copied.
        method: The method to train with.
        inputs: The inputs of a micro-batch; only shapes and dtypes matter.
        targets: The targets of a micro-batch.
        loss: The loss.
        optimizer: Creates an optimizer for a list of parameters.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        method: Method,
        inputs: Streams,
        targets: Any,
        *,
        loss: Loss,
        optimizer: OptimizerFactory,
    ) -> None:
        self.layers = [deepcopy(layer).to("meta") for layer in layers]
        self.method, self.loss, self.optimizer = method, loss, optimizer
        self.inputs = tuple(torch.empty_like(x, device="meta") for x in inputs)
        self.targets = torch.empty_like(targets, device="meta") if isinstance(targets, Tensor) else targets
        settings = Settings(torch.device("meta"))
        self._builder = StageBuilder(self.layers, method, settings, loss=loss, optimizer=self._optimizer)
        self._format = MessageFormat(
            channels_last=any(channels_last(p) for layer in self.layers for p in layer.parameters())
        )
        singles = [range(i, i + 1) for i in range(len(layers))]
        self._shapes = ShapeInference(self.layers, singles, method).shapes(shapes_of(self.inputs))

    def with_storage(self, storages: Sequence[str]) -> MemoryEstimator:
        """Return an estimator for the same layers with other storages.

        Args:
            storages: The storage of each layer.

        Returns:
            The estimator.
        """
        layers = deepcopy(self.layers)
        set_storage(layers, storages)
        return MemoryEstimator(layers, self.method, self.inputs, self.targets, loss=self.loss, optimizer=self.optimizer)

    def memory(self, cuts: Sequence[range], first: int, schedule: PipelineSchedule) -> list[StageMemory]:
        """Return the peak memory of consecutive stages of a full pipeline.

        The result is exact for any cut of the other layers: a rank only sees messages of other stages, and their shapes
        depend on where its own layers begin and end.

        Args:
            cuts: The indices of the layers of each of these stages.
            first: The index of the first of these stages.
            schedule: The schedule of the whole pipeline.

        Returns:
            The memory of each of these stages.
        """
        stages = [self._stage(index, cut, schedule.stages) for index, cut in enumerate(cuts, first)]
        segment = range(cuts[0].start, cuts[-1].stop)
        mailbox = _SimulatedMailbox(
            stages,
            schedule,
            self._shapes.forward[segment.start],
            self._backward(stages[-1], segment.stop),
            self._format,
        )
        executor = Executor(stages, schedule, mailbox)
        # After these ticks, all stages are busy, optimizers have their state, and the stash has its full size.
        rounds = 2 if self.method.stashes_weights else 1
        full = rounds * (schedule.staleness(0) + schedule.accumulate)
        for _ in range(full):
            self._tick(executor)
        peaks: list[StageMemory] = []
        for _ in range(schedule.accumulate):
            mailbox.receive_all()
            with MemoryProbe(executor) as probe:
                self._tick(executor)
            both = zip(peaks or probe.stages, probe.stages, strict=True)
            peaks = [max(pair, key=lambda row: row.total) for pair in both]
        return peaks

    def _tick(self, executor: Executor) -> None:
        # Optimizers of torchao compile their steps, in vain on this device.
        with FastMetaOperations(), torch.compiler.set_stance("force_eager"):
            # Every micro-batch has its own memory.
            executor.tick(tuple(torch.empty_like(x) for x in self.inputs), self.targets)

    def _stage(self, index: int, cut: range, count: int) -> Stage:
        layers = [deepcopy(layer) if i in cut else layer for i, layer in enumerate(self.layers)]
        return replace(self._builder, layers=layers).build(index, count, cut)

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
        trained = [p for p in parameters if p.requires_grad]
        return create_optimizer(self.optimizer, trained, {}) if trained else None

    def _needs_outputs(self, layer: int) -> bool:
        return self.method.needs_outputs(StageLayers([self.layers[layer]], layer, self._builder.settings))

    def _backward(self, stage: Stage, stop: int) -> Template:
        """Return the shapes of the message from the next stage, which starts at layer ``stop``."""
        message = self._shapes.backward[stop - 1]
        gradients = as_message(message, self._needs_outputs(stop - 1)).gradients
        return (*self._shapes.forward[stop], *gradients) if stage.needs_outputs and not stage.last else gradients


class _SimulatedMailbox(LocalMailbox):
    """The messages of consecutive stages on the meta device, with simulated neighbours.

    As on a rank, a message is in transit until it is used, or received between ticks.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: PipelineSchedule,
        forward: Template,
        backward: Template,
        format: MessageFormat,
    ) -> None:
        super().__init__(schedule.stages, format)
        self._first, self._last = stages[0], stages[-1]
        self._owned = {stage.index for stage in stages}
        self._forward_template, self._backward_template = forward, backward
        self._pending_forward: dict[int, Streams] = {}  # for the first of these stages
        self._pending_backward: dict[int, BackwardMessage] = {}  # for the last of these stages

    def receive_all(self) -> None:
        """Receive the messages that are in transit."""
        self.forward[self._first.index] |= self._pending_forward
        self.backward[self._last.index] |= self._pending_backward
        self._pending_forward, self._pending_backward = {}, {}

    def read(self, microbatch: int, inputs: Streams, targets: Any, weight: float) -> None:
        if self._first.index == 0:
            self.forward[0][microbatch] = inputs
        if self._last.last:
            self.targets[microbatch] = targets, weight

    def begin_remote_action(self, action: Action) -> None:
        if action.kind is Kind.FORWARD and action.stage + 1 == self._first.index:
            streams = tuple(x for x in _new_tensors(self._forward_template) if x is not None)
            self._pending_forward[action.microbatch] = streams
        elif action.kind is Kind.BACKWARD and action.stage - 1 == self._last.index:
            message = as_message(_new_tensors(self._backward_template), self._last.needs_outputs)
            self._pending_backward[action.microbatch] = message

    def take_forward(self, stage: Stage, microbatch: int) -> Streams:
        if stage is self._first and microbatch in self._pending_forward:
            return self._pending_forward.pop(microbatch)
        return super().take_forward(stage, microbatch)

    def take_backward(self, stage: Stage, microbatch: int) -> BackwardMessage:
        if stage is self._last and microbatch in self._pending_backward:
            return self._pending_backward.pop(microbatch)
        return super().take_backward(stage, microbatch)

    def send_forward(self, action: Action, streams: Streams) -> None:
        if action.stage + 1 in self._owned:
            super().send_forward(action, streams)

    def send_backward(self, action: Action, message: BackwardMessage) -> None:
        if action.stage - 1 in self._owned:
            super().send_backward(action, message)


def _new_tensors(template: Template) -> Template:
    return tuple(None if t is None else torch.empty_like(t) for t in template)
