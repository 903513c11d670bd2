"""Keys and values of earlier tokens, so that a language model reads each token of a growing text once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class KeyValueCache:
    """The keys and values that attention branches have computed for the tokens of a text so far.

    Args:
        capacity: Maximum number of tokens.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.start = 0
        """The position of the first token of the current evaluation."""
        self.length = 0
        """The number of tokens read, including those of the current evaluation."""
        self._stored: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def begin(self, tokens: int) -> int:
        """Start an evaluation of the next tokens, and return the position of the first of them."""
        if self.length and tokens > 1:
            raise ValueError(f"the cache holds {self.length} tokens, and {tokens} follow: give one token at a time")
        self.start, self.length = self.length, self.length + tokens
        if self.length > self.capacity:
            raise ValueError(f"the text has {self.length} tokens, but the cache only has room for {self.capacity}")
        return self.start

    def extend(self, branch: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the new tokens, and return those of all tokens.

        Args:
            branch: The attention branch that they belong to.
            keys: Keys of the new tokens, of shape (batch, heads, tokens, channels).
            values: Their values.
        """
        if branch not in self._stored:
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            self._stored[branch] = keys.new_empty(shape), values.new_empty(shape)
        found = []
        for stored, new in zip(self._stored[branch], (keys, values), strict=True):
            stored[:, :, self.start : self.length] = new
            found.append(stored[:, :, : self.length])
        return found[0], found[1]

    def clear(self) -> None:
        """Forget the text, but keep the memory for the next one."""
        self.length = 0


class CachingModule(nn.Module):
    """A module that reads and extends a cache, if it has one."""

    cache: KeyValueCache | None = None


@contextmanager
def use_cache(modules: Iterable[nn.Module], cache: KeyValueCache) -> Iterator[None]:
    """Let those of the modules that can read a cache use this one inside a `with` block."""
    users = [module for module in modules if isinstance(module, CachingModule)]
    for module in users:
        module.cache = cache
    try:
        yield
    finally:
        for module in users:
            module.cache = None
