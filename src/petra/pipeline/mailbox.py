"""Mailboxes hold messages between stages. The executor asks a mailbox, and does not know who the neighbours are.

A mailbox also rounds messages and decides their layout. `LocalMailbox` serves all stages of one process.
Other mailboxes derive from it: one exchanges messages with other ranks, one simulates its neighbours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from petra.methods import BackwardMessage
from petra.pipeline.message_format import MessageFormat
from petra.pipeline.message_layout import PackedMessage
from petra.pipeline.stage import Stage
from petra.reversible.streams import Streams
from petra.schedule import Action, Kind, Tick

Shapes = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shape and dtype of each input of a micro-batch."""

EVALUATION = -1
"""The micro-batch number of messages in evaluation mode."""


class Outgoing(NamedTuple):
    """A message to another rank."""

    to: int
    """The rank that receives it."""
    action: Action
    """The action that it results from."""
    message: PackedMessage
    """The content."""


class Incoming(NamedTuple):
    """A message that another rank sends in a tick."""

    source: int
    """The rank that sends it."""
    action: Action
    """The action that it results from."""
    to: int
    """The stage that receives it."""
    form: Any
    """The form of these messages, for the mailbox that made it."""


class StaticMessage(NamedTuple):
    """Memory for the messages that a captured graph takes."""

    message: Any
    """The message, as it waits in the mailbox."""
    tensors: list[Tensor]
    """Its tensors."""
    memory: Tensor
    """The vector of bytes in which they lie."""
    form: Any
    """The form of these messages, for the mailbox that made it."""


class Mailbox(ABC):
    """The messages of one executor."""

    format: MessageFormat
    """The rounding and layout of messages."""
    forward: list[dict[int, Streams]]
    """For each stage, the inputs that wait for it."""
    backward: list[dict[int, BackwardMessage]]
    """For each stage, the messages from the stage above."""
    targets: dict[int, tuple[Any, float]]
    """For the last stage, each micro-batch's targets and its weight in the mean gradient."""
    held: list[Any] | None = None
    """If set, messages are appended here when they are taken, to keep their memory alive."""
    exchanges: bool = False
    """True if some stages are on other ranks."""
    outbox: list[Outgoing] | None = None
    """If set, messages to other ranks are collected here instead of being sent."""

    @abstractmethod
    def read(self, microbatch: int, inputs: Streams, targets: Any, weight: float) -> None:
        """Take a micro-batch from the data: inputs for the first stage, targets for the last.

        Args:
            microbatch: Its number.
            inputs: The inputs of the network.
            targets: The targets of the loss.
            weight: The weight of its gradient in the mean over replicas.
        """

    def incoming(self, tick: Tick, start: int, shapes: Mapping[int, Shapes]) -> list[Incoming]:
        """Return the messages that other ranks send to this one in a tick.

        Args:
            tick: The actions of all stages in this tick.
            start: The micro-batch that counts as 0 in it.
            shapes: The shapes of the inputs of all micro-batches in flight.

        Returns:
            The messages in the order in which they are sent.
        """
        return []

    def begin_tick(self, incoming: Sequence[Incoming], first: int = 0) -> None:  # noqa: B027 - optional
        """Post the receives of a tick.

        Args:
            incoming: What `incoming` returned.
            first: The micro-batch that counts as 0 in it.
        """

    def begin_evaluation(self, inputs: Streams) -> None:  # noqa: B027 - optional
        """Prepare for one forward pass in evaluation mode.

        Args:
            inputs: The inputs of the network.
        """

    def begin_remote_action(self, action: Action) -> None:  # noqa: B027 - optional
        """Called when the schedule reaches an action of another rank.

        Args:
            action: The action.
        """

    def comes_from_other_rank(self, stage: int, kind: Kind) -> bool:
        """Return whether the messages that wait for a stage come from another rank.

        Args:
            stage: The stage that receives them.
            kind: `Kind.FORWARD` for those from the stage below, another kind for those from the stage above.

        Returns:
            True if they do.
        """
        return False

    def static_message(self, stage: int, kind: Kind, shapes: Shapes) -> StaticMessage:
        """Return memory for the messages of another rank.

        Args:
            stage: The stage that receives them.
            kind: `Kind.FORWARD` for messages from the stage below, another kind for those from the stage above.
            shapes: The shapes of the inputs of the micro-batches.

        Returns:
            The memory.
        """
        raise AssertionError("there is no other rank")

    def take_into(self, static: StaticMessage, stage: int, kind: Kind, microbatch: int) -> None:
        """Wait for a message of another rank, remove it and copy it into static memory.

        Args:
            static: The memory, from `static_message`.
            stage: The stage that receives it.
            kind: `Kind.FORWARD` for a message from the stage below, another kind for one from the stage above.
            microbatch: The micro-batch.
        """
        raise AssertionError("there is no other rank")

    def transmit(self, message: Outgoing, first: int = 0) -> None:
        """Send a message of the outbox. Its memory may be overwritten afterwards.

        Args:
            message: The message.
            first: The micro-batch that counts as 0 in it.
        """
        raise AssertionError("there is no other rank")

    @abstractmethod
    def take_forward(self, stage: Stage, microbatch: int) -> Streams:
        """Remove and return the inputs of a stage, as they were sent.

        Args:
            stage: The stage that receives them.
            microbatch: The micro-batch.

        Returns:
            The inputs in the dtype of messages; `unpack` converts them.
        """

    @abstractmethod
    def send_forward(self, action: Action, streams: Streams) -> None:
        """Send the outputs of a stage to the next one.

        Args:
            action: The forward that computed them.
            streams: The outputs.
        """

    @abstractmethod
    def take_backward(self, stage: Stage, microbatch: int) -> BackwardMessage:
        """Remove and return what the stage above sent back, ready to compute with.

        Args:
            stage: The stage that receives it.
            microbatch: The micro-batch.

        Returns:
            The message.
        """

    @abstractmethod
    def send_backward(self, action: Action, message: BackwardMessage) -> None:
        """Send gradients, and streams where the stage below needs them, to the stage below.

        Args:
            action: The backward that computed them.
            message: The message.
        """

    @abstractmethod
    def take_targets(self, microbatch: int) -> tuple[Any, float]:
        """Remove and return the targets of a micro-batch.

        Args:
            microbatch: The micro-batch.

        Returns:
            The targets, and the weight of the gradient.
        """

    def unpack(self, stage: Stage, streams: Streams) -> Streams:
        """Convert received streams to what the stage computes with.

        Args:
            stage: The stage.
            streams: Streams in the dtype of messages.

        Returns:
            The streams in float32, or as they are where the stage accepts the dtype of messages.
        """
        return streams if self._accepted_by(stage) else self.format.streams.unpack(streams)

    def _accepted_by(self, stage: Stage) -> bool:
        """Return whether the stage computes with messages as they are."""
        return self.format.dtype is not None and stage.accepts(self.format.dtype)

    def flush(self) -> None:  # noqa: B027 - optional
        """Wait until everything that was sent has left."""

    @abstractmethod
    def tensors(self, stage: int) -> list[Tensor]:
        """Return the tensors that wait for a stage; for the first stage, these are data.

        Args:
            stage: The index of the stage.

        Returns:
            The tensors.
        """

    @property
    @abstractmethod
    def empty(self) -> bool:
        """True if no message waits."""

    @abstractmethod
    def state_dict(self, stage: int) -> dict[str, Any]:
        """Return the messages that wait for a stage; for the last one also the targets.

        Args:
            stage: The index of the stage.

        Returns:
            The state.
        """

    @abstractmethod
    def load_state_dict(self, stage: int, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            stage: The index of the stage.
            state: The state, with its tensors on the device.
        """

    @abstractmethod
    def host_state(self) -> Any:
        """Return which messages wait where, without copying tensors.

        Returns:
            The argument of `load_host_state`.
        """

    @abstractmethod
    def load_host_state(self, state: Any) -> None:
        """Return to an earlier `host_state`.

        Args:
            state: What `host_state` returned.
        """


class LocalMailbox(Mailbox):
    """Messages between the stages of one process.

    A message waits under the number of its micro-batch until the schedule uses it. Nobody writes into a message, so a
    stream that a stage passes through may share its memory with the next message.

    Args:
        stages: The number of stages.
        format: The rounding and layout of messages.
    """

    def __init__(self, stages: int, format: MessageFormat | None = None) -> None:
        self.stages = stages
        self.format = format or MessageFormat()
        self.forward = [{} for _ in range(stages)]
        self.backward = [{} for _ in range(stages)]
        self.targets = {}

    def read(self, microbatch: int, inputs: Streams, targets: Any, weight: float) -> None:
        self.forward[0][microbatch] = inputs
        self.targets[microbatch] = targets, weight

    def take_forward(self, stage: Stage, microbatch: int) -> Streams:
        streams = self.forward[stage.index].pop(microbatch)
        self._hold(streams)
        return streams

    def send_forward(self, action: Action, streams: Streams) -> None:
        self.forward[action.stage + 1][action.microbatch] = self.format.streams.pack(self.format.lay_out(streams))

    def take_backward(self, stage: Stage, microbatch: int) -> BackwardMessage:
        message = self.backward[stage.index].pop(microbatch)
        self._hold(message)
        return self._unpacked(stage, message)

    def send_backward(self, action: Action, message: BackwardMessage) -> None:
        self.backward[action.stage - 1][action.microbatch] = self._packed(message)

    def take_targets(self, microbatch: int) -> tuple[Any, float]:
        return self.targets.pop(microbatch)

    def tensors(self, stage: int) -> list[Tensor]:
        forward = [x for streams in self.forward[stage].values() for x in streams]
        backward = [x for m in self.backward[stage].values() for x in (*(m.streams or ()), *m.gradients)]
        return [x for x in (*forward, *backward) if x is not None]

    @property
    def empty(self) -> bool:
        return not any((*self.forward, *self.backward, self.targets))

    def state_dict(self, stage: int) -> dict[str, Any]:
        backward = {m: (d.streams, d.gradients) for m, d in self.backward[stage].items()}
        targets = dict(self.targets) if stage == self.stages - 1 else {}
        return {"forward": dict(self.forward[stage]), "backward": backward, "targets": targets}

    def load_state_dict(self, stage: int, state: dict[str, Any]) -> None:
        self.forward[stage] = dict(state["forward"])
        self.backward[stage] = {m: BackwardMessage(*d) for m, d in state["backward"].items()}
        if stage == self.stages - 1:
            self.targets = dict(state["targets"])

    def host_state(self) -> Any:
        forward, backward = [dict(waiting) for waiting in self.forward], [dict(waiting) for waiting in self.backward]
        return forward, backward, dict(self.targets)

    def load_host_state(self, state: Any) -> None:
        forward, backward, targets = state
        self.forward[:] = [dict(waiting) for waiting in forward]
        self.backward[:] = [dict(waiting) for waiting in backward]
        self.targets = dict(targets)

    def _packed(self, message: BackwardMessage) -> BackwardMessage:
        streams, gradients = message.streams, self.format.gradients.pack(self.format.lay_out(message.gradients))
        if streams is not None:
            streams = self.format.streams.pack(self.format.lay_out(streams))
        return BackwardMessage(streams, gradients)

    def _unpacked(self, stage: Stage, message: BackwardMessage) -> BackwardMessage:
        if not self.format.rounds or self._accepted_by(stage):
            return message
        streams = None if message.streams is None else self.format.streams.unpack(message.streams)
        return BackwardMessage(streams, self.format.gradients.unpack(message.gradients))

    def _hold(self, message: Any) -> None:
        if self.held is not None:
            self.held.append(message)
