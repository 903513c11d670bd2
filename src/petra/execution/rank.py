"""Carries a schedule out on one rank of many: its own stages, with messages from and to the neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from petra.execution.envelope import Template
from petra.execution.local import LocalExecutor
from petra.execution.stage import Finished, Stage
from petra.execution.templates import Rehearsal, as_message, as_tensors, shapes_of
from petra.execution.transport import Arrival, Transport
from petra.methods import BackwardMessage
from petra.reversible.streams import Streams
from petra.schedule import Action, Kind, Order, Tick


class RankExecutor(LocalExecutor):
    """The stages of one rank.

    All ranks make the same calls with micro-batches of the same shapes; the first stage's rank uses the
    inputs, the last stage's the targets. Every rank knows the whole schedule, so at the start of a tick it
    makes room for all messages that its neighbours will send in that tick, in the order in which they do,
    and waits for each only when it is used.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        order: Order,
        placement: Sequence[int],
        transport: Transport,
        rehearsal: Rehearsal,
        channels_last: bool = False,
    ) -> None:
        super().__init__(stages, order)
        self._placement = list(placement)  # stage -> rank
        self._transport = transport
        self._rehearsal = rehearsal
        self._channels_last = channels_last  # whether images travel with their channels last
        self.doing = transport.doing
        self._arriving_up: dict[tuple[int, int], Arrival] = {}
        self._arriving_down: dict[tuple[int, int], Arrival] = {}

    def _read(self, inputs: Streams, targets: Any, weight: float) -> None:
        if 0 in self._owned:
            self.ups[0][self.microbatches] = inputs
        if self.order.stages - 1 in self._owned:
            self.targets[self.microbatches] = targets, weight

    def _perform(self, tick: Tick) -> list[Finished]:
        self._transport.turn()
        self._make_room(tick)
        return super()._perform(tick)

    def _make_room(self, tick: Tick) -> None:
        for phase in tick:
            for action in phase:
                if action.stage in self._owned:
                    continue
                source = self._placement[action.stage]
                sent = Action(action.stage, action.kind, self._start + action.microbatch)
                if action.kind is Kind.FORWARD and (to := action.stage + 1) in self._owned:
                    template = self._rehearsal.shapes(self._shapes[sent.microbatch]).ups[to]
                    self._arriving_up[to, sent.microbatch] = self._receive(source, sent, template)
                elif action.kind is Kind.BACKWARD and (to := action.stage - 1) in self._owned:
                    template = self._rehearsal.shapes(self._shapes[sent.microbatch]).downs[to]
                    self._arriving_down[to, sent.microbatch] = self._receive(source, sent, template)

    def _take_up(self, stage: int, microbatch: int) -> Streams:
        if (stage, microbatch) in self._arriving_up:
            return tuple(x for x in self._arriving_up.pop((stage, microbatch))() if x is not None)
        return super()._take_up(stage, microbatch)

    def _send_up(self, action: Action, streams: Streams) -> None:
        if action.stage + 1 in self._owned:
            super()._send_up(action, streams)
        else:
            self._send(self._placement[action.stage + 1], action, streams)

    def _take_down(self, stage: int, microbatch: int) -> BackwardMessage:
        if (stage, microbatch) in self._arriving_down:
            tensors = self._arriving_down.pop((stage, microbatch))()
            return as_message(tensors, self._owned[stage].needs_outputs)
        return super()._take_down(stage, microbatch)

    def _send_down(self, action: Action, message: BackwardMessage) -> None:
        if action.stage - 1 in self._owned:
            super()._send_down(action, message)
        else:
            tensors = as_tensors(message)
            shapes = self._shapes.get(action.microbatch)  # where stages predict gradients, it may have left already
            wanted = tensors if shapes is None else self._rehearsal.shapes(shapes).downs[action.stage - 1]
            if [x is None for x in tensors] != [x is None for x in wanted]:
                raise ValueError(
                    f"stage {action.stage} has no gradient for one of its inputs in micro-batch {action.microbatch}, "
                    "or one more than others have: on several ranks, have each micro-batch use all streams, "
                    "if need be by adding zero times a stream"
                )
            self._send(self._placement[action.stage - 1], action, tensors)

    def _send(self, to: int, label: Action, tensors: Template) -> None:
        # Transports send values in the order of dimensions: in this one, that is how they lie in memory.
        self._transport.send(to, label, self._turned(tensors, 0, 2, 3, 1))

    def _receive(self, source: int, label: Action, template: Template) -> Arrival:
        arrival = self._transport.receive(source, label, self._turned(template, 0, 2, 3, 1))
        return lambda: self._turned(arrival(), 0, 3, 1, 2)

    def _turned(self, tensors: Template, *dimensions: int) -> Template:
        """With the dimensions of images in another order, where their channels come last."""
        if not self._channels_last:
            return tensors
        return tuple(x.permute(dimensions) if x is not None and x.ndim == 4 else x for x in tensors)

    def drain(self) -> list[Finished]:
        finished = super().drain()
        self._transport.flush()
        return finished

    def state_dict(self) -> dict[str, Any]:
        for stage, microbatch in list(self._arriving_up):
            self.ups[stage][microbatch] = self._take_up(stage, microbatch)
        for stage, microbatch in list(self._arriving_down):
            self.downs[stage][microbatch] = self._take_down(stage, microbatch)
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any], waiting: Mapping[int, dict[str, Any]]) -> None:
        super().load_state_dict(state, waiting)
        self._arriving_up.clear()
        self._arriving_down.clear()

    def predict(self, inputs: Streams) -> Streams | None:  # type: ignore[override]
        """Outputs on the last stage's rank, None on the others."""
        self._transport.turn()
        ups = self._rehearsal.outputs(shapes_of(inputs))
        streams: Streams = inputs
        for stage in self.stages:
            self.doing.now(f"evaluation on stage {stage.index}")
            if stage.index > 0 and stage.index - 1 not in self._owned:
                sent = Action(stage.index - 1, Kind.FORWARD, -1)
                arrival = self._receive(self._placement[sent.stage], sent, ups[stage.index])
                streams = tuple(x for x in arrival() if x is not None)
            streams = stage.predict(streams)
            if not stage.last and stage.index + 1 not in self._owned:
                sent = Action(stage.index, Kind.FORWARD, -1)
                self._send(self._placement[stage.index + 1], sent, streams)
        self.doing.now("between ticks")
        return streams if self.stages[-1].last else None
