"""What stands in for a container of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from torch import nn

from petra.conversion.run import Run

Member = Run | nn.Module


class ReversibleBlocks(nn.Module):
    """Takes the place of an ``nn.Sequential`` or ``nn.ModuleList`` whose blocks were made reversible.

    It owns the same modules under the same names, so parameters are called as before and state dicts fit
    both ways. Its members are what is called: a `Run` for each run of converted blocks, and the modules
    in between as they are. Iterating, indexing and ``len`` go over members, as the network's own loop
    over its blocks does; calling goes through them one after the other.
    """

    def __init__(self, modules: Mapping[str, nn.Module], members: Sequence[Member]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        # In a tuple, because the modules behind them are registered above.
        self.members = tuple(members)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        for member in self.members:
            x = member(x, *args, **kwargs)
        return x

    @property
    def runs(self) -> tuple[Run, ...]:
        """The members that are reversible."""
        return tuple(member for member in self.members if isinstance(member, Run))

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
                f"there is no member {index}: {len(self._modules)} blocks that were made reversible are called as "
                f"{len(self.members)} now, so let the network loop over them instead of counting them"
            ) from None

    def extra_repr(self) -> str:
        return "\n".join(f"reversible: {', '.join(run.names)}" for run in self.runs)
