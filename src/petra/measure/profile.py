"""Seconds of every layer, measured with the engine's own stages of one layer each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import astuple, dataclass, replace
from itertools import repeat
from statistics import median
from typing import Any

import torch
from torch import nn

from petra.execution import Rehearsal, Stage
from petra.execution.stage import Loss, OptimizerFactory
from petra.execution.templates import shapes_of
from petra.methods import BackwardMessage, Chain, Method, Settings
from petra.reversible.streams import Streams, channels_last


@dataclass(frozen=True)
class Seconds:
    """Of one forward, one backward, one update, and of one step of what predicts gradients."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    learn: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(*(factor * a for a in astuple(self)))

    def per_tick(self, accumulate: int) -> float:
        """Of a tick on average, with an update every ``accumulate`` micro-batches."""
        return self.forward + self.backward + self.learn + self.update / accumulate


@dataclass(frozen=True)
class Profile:
    """Seconds of the layers of a network under one method."""

    layers: list[Seconds]
    """Each layer in a stage below the last; the last layer with the loss."""
    recorded: dict[int, Seconds]
    """Layers that cost something else where the last stage keeps their graph instead of running them again."""
    records: list[list[int]]
    """For each layer, those that get this other price when the last stage begins there."""

    def stage(self, cut: range) -> Seconds:
        """Of a stage of these layers."""
        recorded = self.records[cut.start] if cut.stop == len(self.layers) else ()
        return sum((self.recorded[i] if i in recorded else self.layers[i] for i in cut), Seconds())

    def scaled(self, factors: Sequence[float]) -> Profile:
        """With the seconds of each layer times its factor."""
        layers = [s * factor for s, factor in zip(self.layers, factors, strict=True)]
        return Profile(layers, {i: s * factors[i] for i, s in self.recorded.items()}, self.records)

    def to_json(self) -> list[Any]:
        """Plain values that `from_json` reads."""
        recorded = [[i, astuple(s)] for i, s in self.recorded.items()]
        return [[astuple(s) for s in self.layers], recorded, self.records]

    @classmethod
    def from_json(cls, values: list[Any]) -> Profile:
        layers, recorded, records = values
        return cls([Seconds(*s) for s in layers], {i: Seconds(*s) for i, s in recorded}, records)

    @staticmethod
    def median(profiles: Sequence[Profile]) -> Profile:
        """Of several profiles of the same network, number by number."""
        first = profiles[0]
        return Profile(
            [_median([p.layers[i] for p in profiles]) for i in range(len(first.layers))],
            {i: _median([p.recorded[i] for p in profiles]) for i in first.recorded},
            first.records,
        )


class Stopwatch:
    """Notes the seconds of everything that a stage does from now on."""

    def __init__(self, stage: Stage) -> None:
        self.forward: list[float] = []
        self.backward: list[float] = []
        self.update: list[float] = []
        self.learn: list[float] = []
        self._device = stage.chain.settings.device
        for name in ("forward", "backward", "update", "learn"):
            setattr(stage, name, self._timed(getattr(stage, name), getattr(self, name)))
        # The loss belongs to the forward of the last stage, which has just been noted.
        setattr(stage, "finish", self._timed(stage.finish, self.forward, join=True))  # noqa: B010

    @property
    def total(self) -> float:
        """All seconds so far."""
        return sum(self.forward) + sum(self.backward) + sum(self.update) + sum(self.learn)

    def rounds(self) -> list[Seconds]:
        """Of each forward, backward and update, as long as there are all three, with each `learn` if there are any."""
        learn = self.learn or repeat(0.0)
        return [Seconds(*round) for round in zip(self.forward, self.backward, self.update, learn, strict=False)]

    def _timed(self, work: Callable[..., Any], seconds: list[float], join: bool = False) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = self._now()
            result = work(*arguments)
            taken = self._now() - began
            if join:
                seconds[-1] += taken
            else:
                seconds.append(taken)
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
    """Medians over ``repeats`` micro-batches like ``inputs``, after ``warmup`` others.

    Every layer is a stage of its own and does what the method has it do. The layers themselves are left as they
    are: the work is done on a copy.
    """
    settings = settings or Settings(inputs[0].device)
    records = _records(layers, method, inputs)
    layers, count = deepcopy(list(layers)), len(layers)
    chains = [
        Chain([layer], i, settings, a) for i, (layer, a) in enumerate(zip(layers, [*layers[1:], None], strict=True))
    ]

    def stage(i: int, last: bool, trained: list[nn.Parameter]) -> Stage:
        return Stage(
            count - 1 if last else i,
            count,
            chains[i],
            method,
            optimizer(trained) if trained else None,
            loss=loss if i == count - 1 else None,
            sends_streams=i > 0 and method.needs_outputs(chains[i - 1]),
            synthesizer=None if last else method.synthesizer(chains[i]),
            channels_last=any(channels_last(p) for layer in layers for p in layer.parameters()),
        )

    stages = [stage(i, i == count - 1, [p for p in chains[i].parameters() if p.requires_grad]) for i in range(count)]
    recorded = {i: stage(i, True, []) for i in sorted({i for run in records for i in run})}
    watches = [Stopwatch(s) for s in stages]
    others = {i: Stopwatch(s) for i, s in recorded.items()}
    # A stashing method copies weights only if an update comes between a forward and its backward.
    delay = 1 if method.stashes_weights else 0
    turned: deque[tuple[int, list[Streams], BackwardMessage]] = deque()
    for microbatch in range(warmup + repeats + delay):
        entering, streams = [], inputs
        for s in stages:
            entering.append(streams)
            streams = s.forward(microbatch, streams)
        stages[-1].finish(microbatch, streams, targets)
        message = stages[-1].backward(microbatch, None)
        stages[-1].update()
        turned.append((microbatch, entering, message))
        if len(turned) > delay:
            oldest, entering, message = turned.popleft()
            for i in reversed(range(count - 1)):
                if i in recorded:
                    recorded[i].forward(oldest, entering[i])
                    recorded[i].backward(oldest, message)
                    recorded[i].update()
                above, predicts = message, stages[i].predicts
                message = stages[i].backward(oldest, None if predicts else above)
                stages[i].update()
                if predicts:
                    stages[i].learn(above)
    rounds = [watch.rounds()[warmup : warmup + repeats] for watch in watches]
    measured = [_median(layer) for layer in rounds]
    # What interrupts a process now and then shows in the time of a whole round, but in no median of a layer.
    whole = median(sum(s.per_tick(1) for s in round) for round in zip(*rounds, strict=True))
    scale = whole / sum(s.per_tick(1) for s in measured)
    # Layers are updated in the last stage as in any other.
    again = {i: replace(_median(w.rounds()[warmup:]), update=measured[i].update) * scale for i, w in others.items()}
    return Profile([s * scale for s in measured], again, records)


def _records(layers: Sequence[nn.Module], method: Method, inputs: Streams) -> list[list[int]]:
    """For each layer: if the last stage begins there, which layers have a graph earlier than in another stage."""
    outline = [deepcopy(layer).to("meta") for layer in layers]
    entering = Rehearsal(outline, [range(i, i + 1) for i in range(len(outline))], method).shapes(shapes_of(inputs)).ups
    settings = Settings(torch.device("meta"))
    seen: set[int] = set()

    def note(i: int) -> Callable[..., None]:
        return lambda *_: seen.add(i) if torch.is_grad_enabled() else None

    for i, layer in enumerate(outline):
        for module in layer.modules():
            module.register_forward_pre_hook(note(i))

    def seen_in(start: int, stop: int, final: bool) -> set[int]:
        seen.clear()
        streams = tuple(x for x in entering[start] if x is not None)
        method.forward(Chain(outline[start:stop], start, settings), 0, streams, final)
        return set(seen)

    count = len(outline)
    always = {i for i in range(count) if seen_in(i, i + 1, False)}
    # The last layer is in the last stage wherever that begins.
    return [sorted(seen_in(start, count, True) - always - {count - 1}) for start in range(count)]


def _median(values: Sequence[Seconds]) -> Seconds:
    return Seconds(*(median(numbers) for numbers in zip(*map(astuple, values), strict=True)))
