"""Measures the time of every layer in stages of one layer each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import astuple, dataclass, replace
from itertools import repeat
from statistics import median
from typing import Any

import torch
from torch import nn

from petra.methods import BackwardMessage, Method, Settings, StageLayers
from petra.pipeline import MessageFormat, ShapeInference, Stage, StageBuilder
from petra.pipeline.fast_meta import FastMetaOperations
from petra.pipeline.message_shapes import shapes_of
from petra.pipeline.optimizer_factory import OptimizerFactory, create_optimizer
from petra.pipeline.stage import Loss
from petra.reversible.streams import Streams, channels_last


@dataclass(frozen=True)
class Seconds:
    """The durations of the actions of a stage."""

    forward: float = 0.0
    """Seconds of one forward."""
    backward: float = 0.0
    """Seconds of one backward."""
    update: float = 0.0
    """Seconds of one update."""
    learn: float = 0.0
    """Seconds of one training step of the synthesizer."""

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(*(factor * a for a in astuple(self)))

    def per_tick(self, accumulate: int) -> float:
        """Return the mean time of a tick.

        Args:
            accumulate: The number of micro-batches per update.

        Returns:
            Seconds.
        """
        return self.forward + self.backward + self.learn + self.update / accumulate


@dataclass(frozen=True)
class Profile:
    """The times of the layers of a network with one method."""

    layers: list[Seconds]
    """Each layer in a stage that is not the last one. The last layer includes the loss."""
    recorded: dict[int, Seconds]
    """Times of layers in the last stage, which keeps their autograd graph instead of recomputing it."""
    records: list[list[int]]
    """For each layer, the layers that have their times in `recorded` if the last stage begins with it."""

    def stage(self, cut: range) -> Seconds:
        """Return the times of a stage.

        Args:
            cut: The indices of its layers.

        Returns:
            The sums over its layers.
        """
        recorded = self.records[cut.start] if cut.stop == len(self.layers) else ()
        return sum((self.recorded[i] if i in recorded else self.layers[i] for i in cut), Seconds())

    def scaled(self, factors: Sequence[float]) -> Profile:
        """Return a profile with scaled times.

        Args:
            factors: A factor for each layer.

        Returns:
            The scaled profile.
        """
        layers = [s * factor for s, factor in zip(self.layers, factors, strict=True)]
        return Profile(layers, {i: s * factors[i] for i, s in self.recorded.items()}, self.records)

    def storing(self, stored: Collection[int]) -> Profile:
        """Return a profile in which some reversible layers store their activations.

        Their functions are then evaluated once, not twice.

        Args:
            stored: The indices of these layers.

        Returns:
            The profile.
        """
        layers = [
            replace(s, backward=max(0.0, s.backward - s.forward)) if i in stored else s
            for i, s in enumerate(self.layers)
        ]
        return replace(self, layers=layers)

    def to_json(self) -> list[Any]:
        """Convert the profile to plain values.

        Returns:
            The argument of `from_json`.
        """
        recorded = [[i, astuple(s)] for i, s in self.recorded.items()]
        return [[astuple(s) for s in self.layers], recorded, self.records]

    @classmethod
    def from_json(cls, values: list[Any]) -> Profile:
        """Restore a profile.

        Args:
            values: The result of `to_json`.

        Returns:
            The profile.
        """
        layers, recorded, records = values
        return cls([Seconds(*s) for s in layers], {i: Seconds(*s) for i, s in recorded}, records)

    @staticmethod
    def median(profiles: Sequence[Profile]) -> Profile:
        """Return the medians of several profiles of the same network.

        Args:
            profiles: The profiles.

        Returns:
            A profile with the median of every time.
        """
        first = profiles[0]
        return Profile(
            [_median([p.layers[i] for p in profiles]) for i in range(len(first.layers))],
            {i: _median([p.recorded[i] for p in profiles]) for i in first.recorded},
            first.records,
        )


class Stopwatch:
    """Records the durations of all actions of a stage from now on.

    Args:
        stage: The stage, whose methods are wrapped.
    """

    def __init__(self, stage: Stage) -> None:
        self.forward: list[float] = []
        self.backward: list[float] = []
        self.update: list[float] = []
        self.learn: list[float] = []
        self._device = stage.layers.settings.device
        for name in ("forward", "backward", "update"):
            setattr(stage, name, self._timed(getattr(stage, name), getattr(self, name)))
        setattr(stage, "train_synthesizer", self._timed(stage.train_synthesizer, self.learn))  # noqa: B010
        # The loss and the prediction of gradients count as part of the forward before them.
        for name in ("compute_loss", "predict_gradient"):
            setattr(stage, name, self._timed(getattr(stage, name), self.forward, add_to_last=True))

    @property
    def total(self) -> float:
        """The sum of all durations so far."""
        return sum(self.forward) + sum(self.backward) + sum(self.update) + sum(self.learn)

    def rounds(self) -> list[Seconds]:
        """Group the durations by micro-batch.

        Returns:
            The n-th forward, backward, update and training step of the synthesizer, as far as there are all of them.
        """
        learn = self.learn or repeat(0.0)
        return [Seconds(*round) for round in zip(self.forward, self.backward, self.update, learn, strict=False)]

    def _timed(self, work: Callable[..., Any], seconds: list[float], add_to_last: bool = False) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = self._now()
            result = work(*arguments)
            elapsed = self._now() - began
            if add_to_last:
                seconds[-1] += elapsed
            else:
                seconds.append(elapsed)
            return result

        return timed

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def profile(
    layers: Sequence[nn.Module],
    method: Method,
    inputs: Streams,
    targets: Any,
    *,
    loss: Loss,
    optimizer: OptimizerFactory,
    settings: Settings | None = None,
    repeats: int = 10,
    warmup: int = 3,
) -> Profile:
    """Measure the time of every layer, in stages of one layer each.

    The layers are copied, and not changed.

    Args:
        layers: The layers of the network.
        method: The method to train with.
        inputs: The inputs of a micro-batch, on the device.
        targets: The targets of a micro-batch.
        loss: The loss.
        optimizer: Creates an optimizer for a list of parameters.
        settings: How layers are evaluated; by default on the device of the inputs.
        repeats: The number of micro-batches to measure.
        warmup: The number of micro-batches before these.

    Returns:
        The medians over `repeats` micro-batches.
    """
    settings = settings or Settings(inputs[0].device)
    records = _records(layers, method, inputs)
    layers, count = deepcopy(list(layers)), len(layers)

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
        trained = [p for p in parameters if p.requires_grad]
        return create_optimizer(optimizer, trained, {}) if trained else None

    builder = StageBuilder(layers, method, settings, loss=loss, optimizer=make_optimizer)
    stages = [builder.build(i, count, range(i, i + 1)) for i in range(count)]
    # The same layers within the last stage, without optimizer and loss.
    final = replace(builder, loss=None, optimizer=None)
    recorded = {i: final.build(count - 1, count, range(i, i + 1)) for i in sorted({i for own in records for i in own})}
    lay_out = MessageFormat(channels_last=any(channels_last(p) for layer in layers for p in layer.parameters())).lay_out
    stopwatches = [Stopwatch(s) for s in stages]
    recorded_stopwatches = {i: Stopwatch(s) for i, s in recorded.items()}
    # A method that stashes weights copies them only if there is an update between a forward and its backward.
    delay = 1 if method.stashes_weights else 0
    awaiting_backward: deque[tuple[int, list[Streams], BackwardMessage]] = deque()
    for microbatch in range(warmup + repeats + delay):
        stage_inputs, streams = [], inputs
        for s in stages:
            stage_inputs.append(streams)
            streams = lay_out(s.forward(microbatch, streams))
            if s.synthesizer is not None:
                s.predict_gradient(microbatch, streams)
        stages[-1].compute_loss(microbatch, streams, targets)
        message = _apply_layout(stages[-1].backward(microbatch, None), lay_out)
        stages[-1].update()
        awaiting_backward.append((microbatch, stage_inputs, message))
        if len(awaiting_backward) > delay:
            oldest, stage_inputs, message = awaiting_backward.popleft()
            for i in reversed(range(count - 1)):
                if i in recorded:
                    recorded[i].forward(oldest, stage_inputs[i])
                    recorded[i].backward(oldest, message)
                    recorded[i].update()
                above, predicts = message, stages[i].predicts
                message = _apply_layout(stages[i].backward(oldest, None if predicts else above), lay_out)
                stages[i].update()
                if predicts:
                    stages[i].train_synthesizer(above)
    rounds = [watch.rounds()[warmup : warmup + repeats] for watch in stopwatches]
    measured = [_median(layer) for layer in rounds]
    # Occasional interruptions of the process lengthen whole rounds, but not the median of a layer.
    whole = median(sum(s.per_tick(1) for s in round) for round in zip(*rounds, strict=True))
    scale = whole / sum(s.per_tick(1) for s in measured)
    # Updates take the same time in all stages.
    in_last_stage = {
        i: replace(_median(w.rounds()[warmup:]), update=measured[i].update) * scale
        for i, w in recorded_stopwatches.items()
    }
    return Profile([s * scale for s in measured], in_last_stage, records)


def _records(layers: Sequence[nn.Module], method: Method, inputs: Streams) -> list[list[int]]:
    """For each layer, return the layers that build a graph in the forward only if the last stage begins with it."""
    meta_layers = [deepcopy(layer).to("meta") for layer in layers]
    stage_inputs = (
        ShapeInference(meta_layers, [range(i, i + 1) for i in range(len(meta_layers))], method)
        .shapes(shapes_of(inputs))
        .forward
    )
    settings = Settings(torch.device("meta"))
    seen: set[int] = set()

    def make_hook(i: int) -> Callable[..., None]:
        return lambda *_: seen.add(i) if torch.is_grad_enabled() else None

    for i, layer in enumerate(meta_layers):
        for module in layer.modules():
            module.register_forward_pre_hook(make_hook(i))

    def recording_layers(start: int, stop: int, final: bool) -> set[int]:
        seen.clear()
        streams = tuple(x for x in stage_inputs[start] if x is not None)
        with FastMetaOperations():
            method.forward(StageLayers(meta_layers[start:stop], start, settings), 0, streams, final)
        return set(seen)

    count = len(meta_layers)
    always = {i for i in range(count) if recording_layers(i, i + 1, False)}
    # The last layer is always in the last stage.
    return [sorted(recording_layers(start, count, True) - always - {count - 1}) for start in range(count)]


def _apply_layout(message: BackwardMessage, lay_out: Callable[[Any], Any]) -> BackwardMessage:
    return BackwardMessage(None if message.streams is None else lay_out(message.streams), lay_out(message.gradients))


def _median(values: Sequence[Seconds]) -> Seconds:
    return Seconds(*(median(numbers) for numbers in zip(*map(astuple, values), strict=True)))
