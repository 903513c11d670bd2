"""Shapes of the messages between stages, found by running one micro-batch on paper."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn

from petra.execution.envelope import Template
from petra.execution.local import Shapes
from petra.execution.stage import Stage
from petra.methods import BackwardMessage, Chain, Method, Settings
from petra.reversible.streams import Streams


@dataclass(frozen=True)
class MessageShapes:
    """For each stage, what comes up to it and what comes back down to it."""

    ups: list[Template]
    downs: list[Template]


class Rehearsal:
    """The network on the "meta" device: every process finds the same shapes, without asking the others."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        cuts: Sequence[range],
        method: Method,
        message_dtype: torch.dtype | None = None,
    ) -> None:
        settings = Settings(torch.device("meta"))
        self._stages: list[Stage] = []
        for index, cut in enumerate(cuts):
            chain = Chain([deepcopy(layers[i]).to("meta") for i in cut], cut.start, settings)
            needed = bool(self._stages) and self._stages[-1].needs_outputs
            self._stages.append(
                Stage(index, len(cuts), chain, method, None, sends_streams=needed, message_dtype=message_dtype)
            )
        self._predicts = method.synthesizer(self._stages[0].chain) is not None
        self._known: dict[Shapes, MessageShapes] = {}
        self._evaluated: dict[Shapes, list[Template]] = {}

    def shapes(self, inputs: Shapes) -> MessageShapes:
        """The messages of a micro-batch with inputs of these shapes."""
        if inputs not in self._known:
            self._known[inputs] = self._run(tuple(torch.empty(s, dtype=d, device="meta") for s, d in inputs))
        return self._known[inputs]

    def outputs(self, inputs: Shapes) -> list[Template]:
        """What comes up to each stage in evaluation mode."""
        if inputs not in self._evaluated:
            streams: Streams = tuple(torch.empty(s, dtype=d, device="meta") for s, d in inputs)
            ups: list[Template] = []
            for stage in self._stages:
                ups.append(streams)
                streams = stage.predict(streams)
            self._evaluated[inputs] = ups
        return self._evaluated[inputs]

    def _run(self, streams: Streams) -> MessageShapes:
        ups: list[Template] = []
        for stage in self._stages:
            ups.append(streams)
            streams = stage.forward(0, streams)
        message = BackwardMessage(streams if self._stages[-1].needs_outputs else None, _gradients(streams))
        downs: list[Template] = []
        for stage, outputs in zip(reversed(self._stages), reversed([*ups[1:], streams]), strict=True):
            downs.insert(0, as_tensors(message))
            if self._predicts:  # whatever comes from above, it has a gradient for each of its outputs
                message = BackwardMessage(None, _gradients(outputs))
            message = stage.backward(0, message)
        for stage in self._stages:
            for parameter in stage.parameters:
                parameter.grad = None
        return MessageShapes(ups, downs)


def _gradients(streams: Template) -> Template:
    return tuple(torch.empty_like(x) if x is not None and x.is_floating_point() else None for x in streams)


def shapes_of(inputs: Streams) -> Shapes:
    """What `Rehearsal.shapes` asks for."""
    return tuple((x.shape, x.dtype) for x in inputs)


def as_tensors(message: BackwardMessage) -> Template:
    """What travels: the streams if there are any, then the gradients."""
    return (*(message.streams or ()), *message.gradients)


def as_message(tensors: Template, with_streams: bool) -> BackwardMessage:
    """The reverse of `as_tensors`."""
    if not with_streams:
        return BackwardMessage(None, tensors)
    half = len(tensors) // 2
    streams = tuple(x for x in tensors[:half] if x is not None)
    return BackwardMessage(streams, tensors[half:])
