"""What one rank will hold, found by running its stages alone on the "meta" device."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from petra.execution import LocalExecutor, Rehearsal, Stage
from petra.execution.envelope import Template
from petra.execution.stage import Loss, OptimizerFactory
from petra.execution.templates import as_message, shapes_of
from petra.measure.memory import MemoryProbe, StageMemory
from petra.methods import BackwardMessage, Chain, Method, Settings
from petra.reversible.streams import Streams, channels_last
from petra.schedule import Action, Kind, Order


class Forecast:
    """A network with everything that decides how much memory its stages take, but the cut."""

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
        self._settings = Settings(torch.device("meta"))
        singles = [range(i, i + 1) for i in range(len(layers))]
        self._shapes = Rehearsal(self.layers, singles, method).shapes(shapes_of(self.inputs))

    def memory(self, cuts: Sequence[range], first: int, order: Order) -> list[StageMemory]:
        """What stages ``first`` and following hold at most with a full pipeline, if ``cuts`` are their layers.

        Exact, whatever the other stages look like: a rank sees nothing of them but messages, whose shapes depend
        on where its own layers begin and end.
        """
        stages = [self._stage(index, cut, order.stages) for index, cut in enumerate(cuts, first)]
        own = range(cuts[0].start, cuts[-1].stop)
        up = self._shapes.ups[own.start]
        executor = _OneRank(stages, order, up, self._down(stages[-1], own.stop))
        # Until every stage is at work, has its momenta, and stashes what it will ever stash.
        rounds = 2 if self.method.stashes_weights else 1
        full = rounds * (order.staleness(0) + order.accumulate)
        for _ in range(full):
            self._tick(executor)
        peaks: list[StageMemory] = []
        for _ in range(order.accumulate):
            executor.take_in()
            with MemoryProbe(executor) as probe:
                self._tick(executor)
            both = zip(peaks or probe.stages, probe.stages, strict=True)
            peaks = [max(pair, key=lambda row: row.total) for pair in both]
        return peaks

    def _tick(self, executor: LocalExecutor) -> None:
        executor.tick(tuple(torch.empty_like(x) for x in self.inputs), self.targets)  # every batch has its own memory

    def _stage(self, index: int, cut: range, count: int) -> Stage:
        above = self.layers[cut.stop] if index < count - 1 else None
        chain = Chain([deepcopy(self.layers[i]) for i in cut], cut.start, self._settings, above)
        trained = [p for p in chain.parameters() if p.requires_grad]
        return Stage(
            index,
            count,
            chain,
            self.method,
            self.optimizer(trained) if trained else None,
            loss=self.loss if index == count - 1 else None,
            sends_streams=index > 0 and self.method.needs_outputs(self._layer(cut.start - 1)),
            synthesizer=self.method.synthesizer(chain) if index < count - 1 else None,
            channels_last=any(channels_last(p) for layer in self.layers for p in layer.parameters()),
        )

    def _layer(self, i: int) -> Chain:
        return Chain([self.layers[i]], i, self._settings)

    def _down(self, stage: Stage, stop: int) -> Template:
        """What comes back to a stage that ends before layer ``stop``."""
        message = self._shapes.downs[stop - 1]
        gradients = as_message(message, self.method.needs_outputs(self._layer(stop - 1))).gradients
        return (*self._shapes.ups[stop], *gradients) if stage.needs_outputs and not stage.last else gradients


class _OneRank(LocalExecutor):
    """Consecutive stages whose neighbours only send, what the schedule has them send.

    As on a rank, a message is on its way until it is used, or taken in between ticks.
    """

    def __init__(self, stages: Sequence[Stage], order: Order, up: Template, down: Template) -> None:
        super().__init__(stages, order)
        self._up, self._down = up, down
        self._arriving_up: dict[int, Streams] = {}  # for the lowest stage
        self._arriving_down: dict[int, BackwardMessage] = {}  # for the highest

    def take_in(self) -> None:
        """What has arrived waits from now on."""
        self.ups[self.stages[0].index] |= self._arriving_up
        self.downs[self.stages[-1].index] |= self._arriving_down
        self._arriving_up, self._arriving_down = {}, {}

    def _read(self, inputs: Streams, targets: Any, weight: float) -> None:
        if self.stages[0].index == 0:
            self.ups[0][self.microbatches] = inputs
        if self.stages[-1].last:
            self.targets[self.microbatches] = targets, weight

    def _hear(self, action: Action) -> None:
        lowest, highest = self.stages[0], self.stages[-1]
        microbatch = self._start + action.microbatch
        if action.kind is Kind.FORWARD and action.stage + 1 == lowest.index:
            self._arriving_up[microbatch] = tuple(x for x in _fresh(self._up) if x is not None)
        elif action.kind is Kind.BACKWARD and action.stage - 1 == highest.index:
            self._arriving_down[microbatch] = as_message(_fresh(self._down), highest.needs_outputs)

    def _take_up(self, stage: int, microbatch: int) -> Streams:
        if stage == self.stages[0].index and microbatch in self._arriving_up:
            return self._arriving_up.pop(microbatch)
        return super()._take_up(stage, microbatch)

    def _take_down(self, stage: int, microbatch: int) -> BackwardMessage:
        if stage == self.stages[-1].index and microbatch in self._arriving_down:
            return self._arriving_down.pop(microbatch)
        return super()._take_down(stage, microbatch)

    def _send_up(self, action: Action, streams: Streams) -> None:
        if action.stage + 1 in self._owned:
            super()._send_up(action, streams)

    def _send_down(self, action: Action, message: Any) -> None:
        if action.stage - 1 in self._owned:
            super()._send_down(action, message)


def _fresh(template: Template) -> Template:
    return tuple(None if t is None else torch.empty_like(t) for t in template)
