"""The messages of one rank: from and to the stages of other ranks, and between its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from petra.distributed.transport import PendingReceive, Transport
from petra.methods import BackwardMessage
from petra.pipeline.codecs import Codec
from petra.pipeline.mailbox import EVALUATION, LocalMailbox, Outgoing, Shapes
from petra.pipeline.message_format import MessageFormat
from petra.pipeline.message_shapes import ShapeInference, Template, as_message, as_tensors, shapes_of
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
        self._shapes: dict[int, Shapes] = {}  # inputs of micro-batches in flight
        self._evaluation: list[Template] = []  # for each stage, the shapes of its inputs in evaluation mode
        self._pending_forward: dict[tuple[int, int], PendingReceive] = {}  # by stage and micro-batch
        self._pending_backward: dict[tuple[int, int], PendingReceive] = {}

    def comes_from_other_rank(self, stage: int, kind: Kind) -> bool:
        other = stage - 1 if kind is Kind.FORWARD else stage + 1
        return 0 <= other < self.stages and other not in self._owned

    def collect(self, stage: int, kind: Kind, microbatch: int) -> None:
        collect = self._collect_forward if kind is Kind.FORWARD else self._collect_backward
        collect(stage, microbatch)

    def transmit(self, message: Outgoing) -> None:
        self._transport.send(message.to, message.action, message.tensors, overwritten=True)

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

    def begin_tick(self, tick: Tick, start: int, shapes: dict[int, Shapes]) -> None:
        self._transport.begin_tick()
        self._shapes = shapes
        for action in (action for phase in tick for action in phase if action.stage not in self._owned):
            sent = Action(action.stage, action.kind, start + action.microbatch)
            if action.kind is Kind.FORWARD and (to := action.stage + 1) in self._owned:
                template = self._shape_inference.shapes(shapes[sent.microbatch]).forward[to]
                self._pending_forward[to, sent.microbatch] = self._receive_streams(sent, template)
            elif action.kind is Kind.BACKWARD and (to := action.stage - 1) in self._owned:
                template = self._shape_inference.shapes(shapes[sent.microbatch]).backward[to]
                self._pending_backward[to, sent.microbatch] = self._receive_backward(sent, template)

    def begin_evaluation(self, inputs: Streams) -> None:
        self._transport.begin_tick()
        self._evaluation = self._shape_inference.outputs(shapes_of(inputs))

    def take_forward(self, stage: Stage, microbatch: int) -> Streams:
        if microbatch == EVALUATION and stage.index - 1 not in self._owned:
            sent = Action(stage.index - 1, Kind.FORWARD, microbatch)
            return _without_none(self._receive_streams(sent, self._evaluation[stage.index])())
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
            self.forward[stage][microbatch] = _without_none(self._pending_forward.pop((stage, microbatch))())

    def _collect_backward(self, stage: int, microbatch: int) -> None:
        if (stage, microbatch) in self._pending_backward:
            tensors = self._pending_backward.pop((stage, microbatch))()
            self.backward[stage][microbatch] = as_message(tensors, self._shape_inference.needs_outputs(stage))

    def _send(self, to: int, header: Action, tensors: Template) -> None:
        # Transports send values in the order of dimensions: in this one, that is their order in memory.
        tensors = self._permuted(tensors, 0, 2, 3, 1)
        if self.outbox is not None:
            self.outbox.append(Outgoing(to, header, tensors))
        else:
            self._transport.send(to, header, tensors)

    def _encoded(self, message: BackwardMessage) -> BackwardMessage:
        streams, gradients = message.streams, self.format.gradients.encode(self.format.lay_out(message.gradients))
        if streams is not None:
            streams = self.format.streams.encode(self.format.lay_out(streams))
        return BackwardMessage(streams, gradients)

    def _receive_streams(self, header: Action, template: Template) -> PendingReceive:
        return self._receive(header, template, [self.format.streams] * len(template))

    def _receive_backward(self, header: Action, template: Template) -> PendingReceive:
        half = len(template) // 2 if self._shape_inference.needs_outputs(header.stage - 1) else 0
        codecs = [self.format.streams] * half + [self.format.gradients] * (len(template) - half)
        return self._receive(header, template, codecs)

    def _receive(self, header: Action, template: Template, codecs: Sequence[Codec]) -> PendingReceive:
        encoded = tuple(codec.encoded_template(t) for codec, t in zip(codecs, template, strict=True))
        source = self._placement[header.stage]
        pending = self._transport.receive(source, header, self._permuted(encoded, 0, 2, 3, 1))

        def arrive() -> Template:
            arrived = zip(codecs, self._permuted(pending(), 0, 3, 1, 2), template, strict=True)
            return tuple(codec.decode(x, like, self.format.channels_last) for codec, x, like in arrived)

        return arrive

    def _permuted(self, tensors: Template, *dimensions: int) -> Template:
        """Return the tensors with the dimensions of images permuted, where channels come last."""
        if not self.format.channels_last:
            return tensors
        return tuple(x.permute(dimensions) if x is not None and x.ndim == 4 else x for x in tensors)


def _without_none(tensors: Template) -> Streams:
    return tuple(x for x in tensors if x is not None)
