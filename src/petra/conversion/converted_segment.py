"""A segment of converted blocks as a reversible function of one stream."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from petra.conversion.blended import Blend, blended_join, blended_split
from petra.conversion.block_spec import Norm
from petra.conversion.residual_views import ByReference
from petra.reversible import ReversibleLayer, plain_autograd, reversible_segment
from petra.reversible.streams import Streams

CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Arguments of Hugging Face blocks to which attention appends keys and values."""

UNSUPPORTED = {
    "encoder_hidden_states": "cross-attention is a third residual function",
    "head_mask": "it differs from block to block",
    "output_attentions": "a segment of reversible blocks keeps no attention maps",
}
"""Arguments that cannot be used, with the reason."""


def additive_split(x: Tensor) -> Streams:
    """Return the two streams x1 = x2 = x, and x itself for `additive_join`.

    Sums that are subtracted again need float32.
    """
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return x, x, x


def additive_join(x1: Tensor, x2: Tensor, x: Tensor) -> Tensor:
    """Return x plus all residuals."""
    return x1 + x2 - x


class ConvertedSegment:
    """Blocks in sequence, called like one block: x → x1 + x2 - x, with streams that start as x1 = x2 = x.

    A view on blocks that belong to a `ReversibleBlocks`. It forwards all other attributes to its first block, because
    networks read settings there (`layers[0].self_attn.batch_first`).
    """

    def __init__(
        self,
        names: Sequence[str],
        blocks: Sequence[nn.Module],
        layers: Sequence[ReversibleLayer],
        *,
        returns_tuple: bool = False,
        final_norm: Norm | None = None,
        blend: Blend | None = None,
    ) -> None:
        self.__name__ = "segment"  # which tracers read
        self.names = tuple(names)
        """The names of the blocks in their container."""
        self.blocks = tuple(blocks)
        self.layers = tuple(layers)
        """The reversible layers, whose f and g are views on the blocks."""
        self.returns_tuple = returns_tuple
        """True if the blocks return tuples."""
        self.blend = blend
        """The weight of blended blocks; None for additive coupling."""
        self.split = additive_split if blend is None else blended_split
        """Makes streams of the input: the two that the layers change, and others for `join`."""
        self.join: Callable[..., Tensor] = additive_join if blend is None else blended_join
        """Makes the output of the streams."""
        self.streams = 3 if blend is None else 2
        """The number of streams of `split`."""
        self.final_norm = final_norm
        """For post-norm blocks: the norm of the last block, which is applied to the output."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (proxy := next((x for x in args if isinstance(x, fx.Proxy)), None)) is not None:
            output = proxy.tracer.create_proxy("call_function", self, args, kwargs)
            return (output,) if self.returns_tuple else output
        given, kwargs = self.bind(args, kwargs)
        streams = self.split(given)
        if streams[0].dtype != given.dtype:  # the blocks receive the dtype that they expect
            kwargs["precision"] = given.dtype
        with self._backward_mode():
            outputs = reversible_segment(self.layers, streams[:2], **kwargs)
        y = self.join(*outputs, *streams[2:]).to(given.dtype)
        if self.final_norm is not None:
            y = self.final_norm(self.blocks[-1])(y)
        return (y,) if self.returns_tuple else y

    def _backward_mode(self) -> AbstractContextManager[None]:
        """Store activations where the original function is computed, which is not invertible."""
        original = self.blend is not None and self.blend.random and not self.blocks[0].training
        return plain_autograd() if original else nullcontext()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "blocks" not in vars(self):
            raise AttributeError(name)
        return getattr(self.blocks[0], name)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Return the input, and the other arguments under their names in the blocks' signature."""
        signature = inspect.signature(self.blocks[0].forward)
        bound = signature.bind(*args, **kwargs).arguments
        x = bound.pop(next(iter(signature.parameters)))
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound.update(bound.pop(parameter.name, {}))
            elif parameter.kind is parameter.VAR_POSITIONAL and bound.pop(parameter.name, ()):
                raise ValueError(f"a reversible {self.kind} takes one positional argument: give the others by name")
        for name, reason in UNSUPPORTED.items():
            value = bound.pop(name, None)
            if value is not None and value is not False:
                raise ValueError(f"{name} was given to a reversible {self.kind}, but {reason}: leave it out")
        for name in CACHES:
            if bound.get(name) is None:
                continue
            if torch.is_grad_enabled():
                raise ValueError(
                    f"{name} was given to a reversible {self.kind} with gradients enabled, but the block is evaluated "
                    "again in the backward pass and would append to it twice: pass use_cache=False (or set "
                    "config.use_cache = False), or use torch.no_grad()"
                )
            bound[name] = ByReference(bound[name])
        return x, bound

    @property
    def kind(self) -> str:
        """The class of the blocks."""
        return type(self.blocks[0]).__name__
