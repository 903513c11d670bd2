"""The rounding and memory layout of the tensors that stages exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from petra.pipeline.codecs import FLOAT32, Codec, find_codecs
from petra.reversible.streams import with_layout

T = TypeVar("T", Tensor, Tensor | None)


@dataclass(frozen=True)
class MessageFormat:
    """How messages between stages are stored and sent."""

    streams: Codec = FLOAT32
    """Rounds streams, forward and backward."""
    gradients: Codec = FLOAT32
    """Rounds gradients."""
    channels_last: bool = False
    """Store images with their channels last, in one process and on ranks, whatever layout the layers return."""

    @classmethod
    def of(cls, comm_dtype: str | torch.dtype | None = None, channels_last: bool = False) -> MessageFormat:
        """Return the format that `comm_dtype` of a trainer describes.

        Args:
            comm_dtype: An argument of `petra.pipeline.codecs.find_codecs`.
            channels_last: True to store images with their channels last.

        Returns:
            The format.

        Raises:
            ValueError: If there is no such codec.
        """
        return cls(*find_codecs(comm_dtype), channels_last)

    @property
    def dtype(self) -> torch.dtype | None:
        """The type that streams and gradients are both cast to; None for float32 and for all other formats."""
        same = self.streams == self.gradients and self.streams.max_value is None and not self.streams.exact
        return self.streams.dtype if same else None

    @property
    def rounds(self) -> bool:
        """True if streams or gradients are rounded."""
        return not (self.streams.exact and self.gradients.exact)

    def __str__(self) -> str:
        if self.streams == self.gradients:
            return self.streams.name
        return f"streams={self.streams.name},gradients={self.gradients.name}"

    def lay_out(self, tensors: tuple[T, ...]) -> tuple[T, ...]:
        """Return the tensors without gaps, in the memory layout of messages.

        Args:
            tensors: Streams or gradients; None stands for a gradient that does not exist.

        Returns:
            The same values; a tensor that already has the layout is returned as it is.
        """
        return tuple(None if t is None else with_layout(t, self.channels_last) for t in tensors)
