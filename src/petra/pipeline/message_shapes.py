"""Shapes of the messages between stages, inferred by running one micro-batch on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn

from petra.methods import BackwardMessage, Method, Settings
from petra.pipeline.build import StageBuilder
from petra.pipeline.fast_meta import FastMetaOperations
from petra.pipeline.mailbox import Shapes
from petra.pipeline.message_format import MessageFormat
from petra.pipeline.message_layout import Template
from petra.reversible.streams import Streams


@dataclass(frozen=True)
class MessageShapes:
    """The messages of one micro-batch."""

    forward: list[Template]
    """For each stage, its inputs."""
    backward: list[Template]
    """For each stage, what the stage above sends back."""


class ShapeInference:
    """Infers the shapes of messages; every process computes the same ones without communication.

    Args:
        layers: The layers of the network.
        cuts: The layers of each stage.
        method: The training method.
        format: The rounding and layout of messages.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        cuts: Sequence[range],
        method: Method,
        format: MessageFormat | None = None,
    ) -> None:
        copies = [deepcopy(layer).to("meta") for layer in layers]
        builder = StageBuilder(copies, method, Settings(torch.device("meta")))
        self._stages = [builder.build(index, len(cuts), cut, synthesizer=False) for index, cut in enumerate(cuts)]
        self._format = format or MessageFormat()
        self._predicts = method.synthesizer(self._stages[0].layers) is not None
        self._known: dict[Shapes, MessageShapes] = {}
        self._evaluated: dict[Shapes, list[Template]] = {}

    def needs_outputs(self, stage: int) -> bool:
        """Return whether the backward of a stage starts from its outputs.

        Args:
            stage: The index of the stage.

        Returns:
            True if the stage above sends streams back to it.
        """
        return self._stages[stage].needs_outputs

    def shapes(self, inputs: Shapes) -> MessageShapes:
        """Return the shapes of all messages of a micro-batch in training.

        Args:
            inputs: The shapes and dtypes of the inputs of the network.

        Returns:
            The messages that each stage receives.
        """
        if inputs not in self._known:
            with FastMetaOperations():
                self._known[inputs] = self._run(tuple(torch.empty(s, dtype=d, device="meta") for s, d in inputs))
        return self._known[inputs]

    def outputs(self, inputs: Shapes) -> list[Template]:
        """Return the inputs of each stage in evaluation mode.

        Args:
            inputs: The shapes and dtypes of the inputs of the network.

        Returns:
            A template for each stage.
        """
        if inputs not in self._evaluated:
            streams: Streams = tuple(torch.empty(s, dtype=d, device="meta") for s, d in inputs)
            templates: list[Template] = []
            with FastMetaOperations():
                for stage in self._stages:
                    templates.append(streams)
                    streams = self._sent(stage.predict(self._format.streams.unpack(streams)), stage.last)
            self._evaluated[inputs] = templates
        return self._evaluated[inputs]

    def network_outputs(self, inputs: Shapes) -> Streams:
        """Return the outputs of the network in evaluation mode.

        Args:
            inputs: The shapes and dtypes of the inputs of the network.

        Returns:
            Tensors on the meta device.
        """
        streams = tuple(x for x in self.outputs(inputs)[-1] if x is not None)
        return self._stages[-1].predict(self._format.streams.unpack(streams))

    def _run(self, streams: Streams) -> MessageShapes:
        forward: list[Template] = []
        for stage in self._stages:
            forward.append(streams)
            streams = self._sent(stage.forward(0, self._format.streams.unpack(streams)), stage.last)
        message = BackwardMessage(streams if self._stages[-1].needs_outputs else None, _gradients(streams))
        backward: list[Template] = []
        for stage, outputs in zip(reversed(self._stages), reversed([*forward[1:], streams]), strict=True):
            backward.insert(0, as_tensors(message))
            if self._predicts:  # whatever comes from above, it has a gradient for each of its outputs
                message = BackwardMessage(None, _gradients(outputs))
            message = self._sent_back(stage.backward(0, self._received(message)))
        for stage in self._stages:
            for parameter in stage.parameters:
                parameter.grad = None
        return MessageShapes(forward, backward)

    def _sent(self, streams: Streams, last: bool) -> Streams:
        return streams if last else self._format.streams.pack(streams)

    def _received(self, message: BackwardMessage) -> BackwardMessage:
        streams = None if message.streams is None else self._format.streams.unpack(message.streams)
        return BackwardMessage(streams, self._format.gradients.unpack(message.gradients))

    def _sent_back(self, message: BackwardMessage) -> BackwardMessage:
        streams = None if message.streams is None else self._format.streams.pack(message.streams)
        return BackwardMessage(streams, self._format.gradients.pack(message.gradients))


def _gradients(streams: Template) -> Template:
    return tuple(torch.empty_like(x) if x is not None and x.is_floating_point() else None for x in streams)


def shapes_of(inputs: Streams) -> Shapes:
    """Return the argument of `ShapeInference.shapes` for these inputs."""
    return tuple((x.shape, x.dtype) for x in inputs)


def as_tensors(message: BackwardMessage) -> Template:
    """Return the tensors that are sent: the streams if there are any, then the gradients."""
    return (*(message.streams or ()), *message.gradients)


def as_message(tensors: Template, with_streams: bool) -> BackwardMessage:
    """Return the message that `as_tensors` took apart."""
    if not with_streams:
        return BackwardMessage(None, tensors)
    half = len(tensors) // 2
    streams = tuple(x for x in tensors[:half] if x is not None)
    return BackwardMessage(streams, tensors[half:])
