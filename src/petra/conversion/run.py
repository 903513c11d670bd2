"""A run of blocks as a reversible function of one stream."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from petra.conversion.branch import Untouched
from petra.conversion.kinds import Norm
from petra.reversible import ReversibleBlock, reversible_run

CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Where attention of Hugging Face appends keys and values."""

REFUSED = {
    "encoder_hidden_states": "cross-attention is a third residual function",
    "head_mask": "it differs from block to block",
    "output_attentions": "a run of reversible blocks keeps no attention maps",
}


class Run:
    """Blocks one after the other, called as one of them: x → x1 + x2 - x, of streams that begin as x1 = x2 = x.

    A view on blocks that belong to a `ReversibleBlocks`. It passes on to its first block whatever else it
    is asked for, because networks look up settings there (``layers[0].self_attn.batch_first``).
    """

    def __init__(
        self,
        names: Sequence[str],
        blocks: Sequence[nn.Module],
        layers: Sequence[ReversibleBlock],
        *,
        tuples: bool = False,
        last: Norm | None = None,
    ) -> None:
        self.names = tuple(names)
        """What the blocks are called in their container."""
        self.blocks = tuple(blocks)
        self.layers = tuple(layers)
        """f and g of each block, as views on the blocks."""
        self.tuples = tuples
        """Whether the blocks return tuples."""
        self.last = last
        """Post-norm blocks: the norm of the last one, through which the joined stream goes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        given, named = self._bind(args, kwargs)
        # What is added up and subtracted again needs the precision; the blocks get what they are used to.
        x = given
        if given.dtype in (torch.float16, torch.bfloat16):
            x, named["precision"] = given.float(), given.dtype
        x1, x2 = reversible_run(self.layers, (x, x), **named)
        y = (x1 + x2 - x).to(given.dtype)
        if self.last is not None:
            y = self.last(self.blocks[-1])(y)
        return (y,) if self.tuples else y

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "blocks" not in vars(self):
            raise AttributeError(name)
        return getattr(self.blocks[0], name)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The stream, and the other arguments under the names that the blocks give them."""
        signature = inspect.signature(self.blocks[0].forward)
        named = signature.bind(*args, **kwargs).arguments
        x = named.pop(next(iter(signature.parameters)))
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                named.update(named.pop(parameter.name, {}))
            elif parameter.kind is parameter.VAR_POSITIONAL and named.pop(parameter.name, ()):
                raise ValueError(f"a reversible {self.kind} takes its arguments by name, but for the first")
        for name, reason in REFUSED.items():
            value = named.pop(name, None)
            if value is not None and value is not False:
                raise ValueError(f"a reversible {self.kind} cannot be called with {name}: {reason}")
        for name in CACHES:
            if named.get(name) is None:
                continue
            if torch.is_grad_enabled():
                raise ValueError(
                    f"a reversible {self.kind} cannot be called with {name} while gradients are recorded: it is "
                    "evaluated again in the backward pass and would append to them twice; pass use_cache=False (or "
                    "set config.use_cache = False), or use torch.no_grad()"
                )
            named[name] = Untouched(named[name])
        return x, named

    @property
    def kind(self) -> str:
        """The class of the blocks."""
        return type(self.blocks[0]).__name__
