"""The messages of one rank: from and to the stages of other ranks, and between its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from petra.distributed.transport import PendingReceive, Transport
from petra.methods import BackwardMessage
from petra.pipeline.codecs import Codec
from petra.pipeline.mailbox import EVALUATION, Incoming, LocalMailbox, Outgoing, Shapes, StaticMessage
from petra.pipeline.message_format import MessageFormat
from petra.pipeline.message_layout import Template, layout_of
from petra.pipeline.message_shapes import ShapeInference, as_message, as_tensors, shapes_of
from petra.pipeline.stage import Stage
from petra.reversible.streams import Streams
from petra.schedule import Action, Kind, Tick


class RankMailbox(LocalMailbox):
    """Messages of the stages of one rank.

    All ranks make the same calls with micro-batches of the same shapes; the rank of the first stage uses the inputs,
    that of the last stage the targets. Every rank knows the whole schedule, so at the start of a tick it posts the
    receives of all messages that its neighbours will send in that tick, in the order in which they send them, and
    waits for each only when it is used.

    Args:
        placement: The rank of each stage.
        transport: Sends and receives.
        shape_inference: The shapes of messages.
        format: The rounding and layout of messages.
    """

    exchanges = True

    def __init__(
        self,
        placement: Sequence[int],
        transport: Transport,
        shape_inference: ShapeInference,
        format: MessageFormat | None = None,
    ) -> None:
        super().__init__(len(placement), format)
        self._placement = list(placement)
        self._owned = {stage for stage, rank in enumerate(placement) if rank == transport.position.rank}
        self._transport = transport
        self._shape_inference = shape_inference
        self._shapes: Mapping[int, Shapes] = {}  # inputs of micro-batches in flight
        self._evaluation: list[Template] = []  # for each stage, the shapes of its inputs in evaluation mode
        self._pending_forward: dict[tuple[int, int], Pending] = {}  # by stage and micro-batch
        self._pending_backward: dict[tuple[int, int], Pending] = {}
        self._forms: dict[tuple[int, Kind, Shapes], MessageForm] = {}

    def comes_from_other_rank(self, stage: int, kind: Kind) -> bool:
        other = stage - 1 if kind is Kind.FORWARD else stage + 1
        return 0 <= other < self.stages and other not in self._owned

    def static_message(self, stage: int, kind: Kind, shapes: Shapes) -> StaticMessage:
        form = self._form(stage, Kind.FORWARD if kind is Kind.FORWARD else Kind.BACKWARD, shapes)
        memory = torch.empty(form.decoded.size, dtype=torch.uint8, device=self._transport.device)
        tensors = form.from_rows(form.decoded.views(memory))
        return StaticMessage(form.as_waiting(tensors), [x for x in tensors if x is not None], memory, form)

    def take_into(self, static: StaticMessage, stage: int, kind: Kind, microbatch: int) -> None:
        waiting = self._pending_forward if kind is Kind.FORWARD else self._pending_backward
        pending = waiting.pop((stage, microbatch), None)
        if pending is not None and pending.form.coded is static.form.decoded:  # it is sent as it waits
            pending.receive.copy_into(static.memory)
            return
        if pending is not None:
            tensors = pending.tensors()
        elif kind is Kind.FORWARD:
            tensors = self.forward[stage].pop(microbatch)
        else:
            tensors = as_tensors(self.backward[stage].pop(microbatch))
        if static.tensors:
            torch._foreach_copy_(static.tensors, [x for x in tensors if x is not None])

    def transmit(self, message: Outgoing, first: int = 0) -> None:
        to, action, packed = message
        self._transport.send_packed(to, action.shifted(first), packed)

    def network_outputs(self, inputs: Shapes) -> Streams:
        """Return the outputs of the network in evaluation mode, as tensors on the meta device.

        Args:
            inputs: The shapes and dtypes of the inputs of the network.

        Returns:
            The outputs.
        """
        return self._shape_inference.network_outputs(inputs)

    def read(self, microbatch: int, inputs: Streams, targets: Any, weight: float) -> None:
        if 0 in self._owned:
            self.forward[0][microbatch] = inputs
        if self.stages - 1 in self._owned:
            self.targets[microbatch] = targets, weight

    def incoming(self, tick: Tick, start: int, shapes: Mapping[int, Shapes]) -> list[Incoming]:
        self._shapes = shapes
        found = []
        for action in (action for phase in tick for action in phase if action.stage not in self._owned):
            to = action.stage + (1 if action.kind is Kind.FORWARD else -1)
            if to in self._owned and action.kind in (Kind.FORWARD, Kind.BACKWARD):
                sent = action.shifted(start)
                form = self._form(to, action.kind, shapes[sent.microbatch])
                found.append(Incoming(self._placement[action.stage], sent, to, form))
        return found

    def begin_tick(self, incoming: Sequence[Incoming], first: int = 0) -> None:
        self._transport.begin_tick()
        received = self._transport.receive_all([(m.source, m.action.shifted(first), m.form.coded) for m in incoming])
        for (_, action, to, form), receive in zip(incoming, received, strict=True):
            waiting = self._pending_forward if action.kind is Kind.FORWARD else self._pending_backward
            waiting[to, first + action.microbatch] = Pending(receive, form)

    def begin_evaluation(self, inputs: Streams) -> None:
        self._transport.begin_tick()
        self._evaluation = self._shape_inference.outputs(shapes_of(inputs))

    def take_forward(self, stage: Stage, microbatch: int) -> Streams:
        if microbatch == EVALUATION and stage.index - 1 not in self._owned:
            sent, template = Action(stage.index - 1, Kind.FORWARD, microbatch), self._evaluation[stage.index]
            form = MessageForm(template, [self.format.streams] * len(template), self.format.channels_last)
            receive = self._transport.receive(self._placement[stage.index - 1], sent, form.coded)
            return _without_none(Pending(receive, form).tensors())
        self._collect_forward(stage.index, microbatch)
        return super().take_forward(stage, microbatch)

    def send_forward(self, action: Action, streams: Streams) -> None:
        if action.stage + 1 in self._owned:
            super().send_forward(action, streams)
        else:
            tensors = self.format.streams.encode(self.format.lay_out(streams))
            self._send(self._placement[action.stage + 1], action, tensors)

    def take_backward(self, stage: Stage, microbatch: int) -> BackwardMessage:
        self._collect_backward(stage.index, microbatch)
        return super().take_backward(stage, microbatch)

    def send_backward(self, action: Action, message: BackwardMessage) -> None:
        if action.stage - 1 in self._owned:
            super().send_backward(action, message)
            return
        tensors = as_tensors(self._encoded(message))
        shapes = self._shapes.get(action.microbatch)  # where gradients are predicted, it may have left already
        expected = tensors if shapes is None else self._shape_inference.shapes(shapes).backward[action.stage - 1]
        if [x is None for x in tensors] != [x is None for x in expected]:
            raise ValueError(
                f"stage {action.stage} has gradients for different inputs in micro-batch {action.microbatch} than "
                "before: on several ranks, every micro-batch must use all streams; add zero times a "
                "stream where it is not used"
            )
        self._send(self._placement[action.stage - 1], action, tensors)

    def flush(self) -> None:
        self._transport.flush()

    def state_dict(self, stage: int) -> dict[str, Any]:
        for owner, microbatch in [key for key in self._pending_forward if key[0] == stage]:
            self._collect_forward(owner, microbatch)
        for owner, microbatch in [key for key in self._pending_backward if key[0] == stage]:
            self._collect_backward(owner, microbatch)
        return super().state_dict(stage)

    def load_state_dict(self, stage: int, state: dict[str, Any]) -> None:
        super().load_state_dict(stage, state)
        self._pending_forward.clear()
        self._pending_backward.clear()

    def _collect_forward(self, stage: int, microbatch: int) -> None:
        if (stage, microbatch) in self._pending_forward:
            pending = self._pending_forward.pop((stage, microbatch))
            self.forward[stage][microbatch] = pending.form.as_waiting(pending.tensors())

    def _collect_backward(self, stage: int, microbatch: int) -> None:
        if (stage, microbatch) in self._pending_backward:
            pending = self._pending_backward.pop((stage, microbatch))
            self.backward[stage][microbatch] = pending.form.as_waiting(pending.tensors())

    def _send(self, to: int, header: Action, tensors: Template) -> None:
        tensors = permuted(tensors, self.format.channels_last, 0, 2, 3, 1)
        if self.outbox is not None:
            self.outbox.append(Outgoing(to, header, layout_of(tensors).pack(tensors)))
        else:
            self._transport.send(to, header, tensors)

    def _encoded(self, message: BackwardMessage) -> BackwardMessage:
        streams, gradients = message.streams, self.format.gradients.encode(self.format.lay_out(message.gradients))
        if streams is not None:
            streams = self.format.streams.encode(self.format.lay_out(streams))
        return BackwardMessage(streams, gradients)

    def _form(self, stage: int, kind: Kind, shapes: Shapes) -> MessageForm:
        """Return the form of the messages of a kind that a stage receives."""
        if (stage, kind, shapes) not in self._forms:
            messages = self._shape_inference.shapes(shapes)
            streams, last = self.format.streams, self.format.channels_last
            if kind is Kind.FORWARD:
                template = messages.forward[stage]
                form = MessageForm(template, [streams] * len(template), last)
            else:
                template, with_streams = messages.backward[stage], self._shape_inference.needs_outputs(stage)
                half = len(template) // 2 if with_streams else 0
                codecs = [streams] * half + [self.format.gradients] * (len(template) - half)
                form = MessageForm(template, codecs, last, partial(as_message, with_streams=with_streams))
            self._forms[stage, kind, shapes] = form
        return self._forms[stage, kind, shapes]


def _without_none(tensors: Template) -> Streams:
    return tuple(x for x in tensors if x is not None)


class MessageForm:
    """How messages are sent and decoded.

    Args:
        template: The tensors of a decoded message.
        codecs: The codec of each of them.
        channels_last: True if images have their channels last.
        as_waiting: Returns a message as it waits in a mailbox, from its tensors.
    """

    def __init__(
        self,
        template: Template,
        codecs: Sequence[Codec],
        channels_last: bool,
        as_waiting: Callable[[Template], Any] = _without_none,
    ) -> None:
        self._template, self._codecs, self._last = template, codecs, channels_last
        self.as_waiting = as_waiting
        coded = tuple(codec.encoded_template(t) for codec, t in zip(codecs, template, strict=True))
        self.coded = layout_of(permuted(coded, channels_last, 0, 2, 3, 1))
        """The layout of messages, as they are sent."""
        self.decoded = layout_of(permuted(template, channels_last, 0, 2, 3, 1))
        """The layout of decoded messages; the same object if there is nothing to decode."""

    def from_rows(self, tensors: Template) -> Template:
        """Return tensors in their own shapes, from those in the order of memory."""
        return permuted(tensors, self._last, 0, 3, 1, 2)

    def decode(self, tensors: Template) -> Template:
        """Return the decoded tensors of a message.

        Args:
            tensors: The tensors as they are sent.

        Returns:
            The tensors in the memory layout of messages.
        """
        arrived = zip(self._codecs, self.from_rows(tensors), self._template, strict=True)
        return tuple(codec.decode(x, like, self._last) for codec, x, like in arrived)


class Pending(NamedTuple):
    """A message whose receive has been posted."""

    receive: PendingReceive
    form: MessageForm

    def tensors(self) -> Template:
        """Wait for the message; return its decoded tensors."""
        return self.form.decode(self.receive())


def permuted(tensors: Template, channels_last: bool, *dimensions: int) -> Template:
    """Return the tensors with the dimensions of images permuted, where channels come last.

    Transports send values in the order of dimensions: with the channels last, that is their order in memory.
    """
    if not channels_last:
        return tensors
    return tuple(x.permute(dimensions) if x is not None and x.ndim == 4 else x for x in tensors)
