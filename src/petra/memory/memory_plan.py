"""The result of fitting a training step into memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from petra.formatting import memory_size, render
from petra.memory.step_cost import StepCost
from petra.reversible import Network


class DoesNotFit(ValueError):
    """No training step fits into the memory."""


@dataclass(frozen=True)
class MeasuredPlan:
    """The storages of the layers and the number of parts of a measured training step, with its cost."""

    storages: tuple[str, ...]
    """The storage of each layer."""
    parts: int
    """The number of parts of the batch, one after another."""
    cost: StepCost | None
    """Its cost; None if there was not enough memory on the device."""

    def describe(self) -> str:
        """Return the storages in words.

        Returns:
            The storages with the numbers of their layers, like `12 store:1, 12 reconstruct`.
        """
        return ", ".join(f"{count} {storage}" for storage, count in Counter(self.storages).items())


@dataclass(frozen=True)
class MemoryPlan:
    """The fastest of the measured training steps that fit into the memory."""

    limit: int
    """The memory limit in bytes."""
    storages: tuple[str, ...]
    """The storage of each layer."""
    parts: int
    """The number of parts into which the batch is split, one after another; 1 for none."""
    cost: StepCost
    """The measured time and peak memory."""
    measured: tuple[MeasuredPlan, ...]
    """All measured plans; empty if the plan comes from the cache."""

    def apply(self, network: Network) -> None:
        """Set the storages of another network of the same structure.

        Args:
            network: The network.
        """
        network.use_storage(*self.storages)

    def __str__(self) -> str:
        chosen = MeasuredPlan(self.storages, self.parts, self.cost)
        lines = [
            f"{chosen.describe()}{_in_parts(self.parts)}: {1e3 * self.cost.seconds:.1f} ms, "
            f"{memory_size(self.cost.peak)} of {memory_size(self.limit)}"
        ]
        if not self.measured:
            return f"{lines[0]} (measured earlier)"
        return "\n\n".join([*lines, table(self.measured, self.limit)])


def table(measured: Sequence[MeasuredPlan], limit: int) -> str:
    """Return the measured plans as a table, the fastest first.

    Args:
        measured: The plans.
        limit: The bytes that are allowed.

    Returns:
        The lines of the table.
    """
    rows = []
    ordered = sorted(measured, key=lambda plan: plan.cost.seconds if plan.cost else float("inf"))
    for plan in ordered:
        if plan.cost is None:
            rows.append([plan.describe(), str(plan.parts), "", "out of memory", ""])
        else:
            fits = "yes" if plan.cost.peak <= limit else ""
            rows.append(
                [plan.describe(), str(plan.parts), f"{1e3 * plan.cost.seconds:.1f}", memory_size(plan.cost.peak), fits]
            )
    return render(["storage of layers", "parts", "ms", "peak", "fits"], rows)


def _in_parts(parts: int) -> str:
    return "" if parts == 1 else f", batch in {parts} parts"
