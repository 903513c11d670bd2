"""The dtype and memory layout of the tensors that stages exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from petra.reversible.streams import with_layout

T = TypeVar("T", Tensor, Tensor | None)


@dataclass(frozen=True)
class MessageFormat:
    """How messages between stages are stored and sent."""

    dtype: torch.dtype | None = None
    """float32 tensors are sent in this dtype; None sends them as float32."""
    channels_last: bool = False
    """Store images with their channels last, in one process and on ranks, whatever layout the layers return."""

    def lay_out(self, tensors: tuple[T, ...]) -> tuple[T, ...]:
        """Return the tensors without gaps, in the memory layout of messages.

        Args:
            tensors: Streams or gradients; None stands for a gradient that does not exist.

        Returns:
            The same values; a tensor that already has the layout is returned as it is.
        """
        return tuple(None if t is None else with_layout(t, self.channels_last) for t in tensors)

    def pack(self, tensors: tuple[T, ...]) -> tuple[T, ...]:
        """Convert float32 tensors to the dtype of messages.

        Args:
            tensors: Streams or gradients of a stage.

        Returns:
            What is sent.
        """
        if self.dtype is None:
            return tensors
        return tuple(t if t is None or t.dtype != torch.float32 else t.to(self.dtype) for t in tensors)

    def unpack(self, tensors: tuple[T, ...]) -> tuple[T, ...]:
        """Convert received tensors back to float32.

        Args:
            tensors: What `pack` returned.

        Returns:
            What a stage computes with.
        """
        if self.dtype is None:
            return tensors
        return tuple(t if t is None or t.dtype != self.dtype else t.float() for t in tensors)
