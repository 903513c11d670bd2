"""The module that replaces a container of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from torch import nn

from petra.conversion.converted_segment import ConvertedSegment

Member = ConvertedSegment | nn.Module


class ReversibleBlocks(nn.Module):
    """Replaces an `nn.Sequential` or `nn.ModuleList` whose blocks were made reversible.

    It owns the same modules under the same names, so parameters keep their names and state dicts fit both ways.
    Iteration, indexing and `len` go over its members, as the network's own loop over blocks expects. Calling it calls
    the members in sequence.

    Args:
        modules: The modules of the original container, by name.
        members: The callables that replace them: a `ConvertedSegment` for each segment of converted blocks, and the
            other modules themselves.
    """

    def __init__(self, modules: Mapping[str, nn.Module], members: Sequence[Member]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        # In a tuple, because their modules are registered above.
        self.members = tuple(members)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the members in sequence.

        Args:
            x: The input of the first member.
            *args: Further arguments for every member.
            **kwargs: Keyword arguments for every member.

        Returns:
            The output of the last member.
        """
        for member in self.members:
            x = member(x, *args, **kwargs)
        return x

    @property
    def segments(self) -> tuple[ConvertedSegment, ...]:
        """The members that are reversible."""
        return tuple(member for member in self.members if isinstance(member, ConvertedSegment))

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    @overload
    def __getitem__(self, index: int) -> Member: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Member, ...]: ...

    def __getitem__(self, index: int | slice) -> Member | tuple[Member, ...]:
        try:
            return self.members[index]
        except IndexError:
            raise IndexError(
                f"index {index} is out of range: {len(self._modules)} modules became {len(self.members)} members when "
                "their blocks were made reversible, so iterate over the members instead of counting blocks"
            ) from None

    def extra_repr(self) -> str:
        return "\n".join(f"reversible: {', '.join(segment.names)}" for segment in self.segments)
