"""What a conversion has changed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from petra.conversion.container import ReversibleBlocks


@dataclass(frozen=True)
class ConvertedRun:
    """A run of blocks that became reversible."""

    path: str
    """Where its container is in the network."""
    names: tuple[str, ...]
    """The blocks in the container."""
    kind: str
    """The class of the blocks."""
    post_norm: bool
    parameters: int

    def __str__(self) -> str:
        where = f"{self.path or 'the network'}[{self.names[0]}{f'…{self.names[-1]}' if len(self.names) > 1 else ''}]"
        norms = ", post-norm, now pre-norm" if self.post_norm else ""
        return f"{where}: {len(self.names)} × {self.kind}{norms}, {self.parameters:,} parameters"


@dataclass(frozen=True)
class ConversionReport:
    """The runs of blocks that became reversible, and how much of the network they are."""

    runs: tuple[ConvertedRun, ...]
    parameters: int
    """Of the whole network."""

    def __str__(self) -> str:
        if not self.runs:
            return "nothing here is reversible by a conversion: give the network that make_reversible has returned"
        share = sum(run.parameters for run in self.runs) / max(self.parameters, 1)
        lines = [f"{len(self.runs)} reversible run(s), {share:.0%} of {self.parameters:,} parameters"]
        lines += [f"  {run}" for run in self.runs]
        one = all(len(run.names) == 1 and not run.post_norm for run in self.runs)
        lines.append(
            "The weights are kept, and each run is of one block, which computes what it did."
            if one
            else "The weights are kept, but the network computes something else than before: fine-tune it."
        )
        return "\n".join(lines)


def conversion_report(module: nn.Module) -> ConversionReport:
    """Tell what `petra.make_reversible` has converted in the network that it has returned."""
    runs = [
        ConvertedRun(path, run.names, run.kind, run.last is not None, _count(nn.ModuleList(run.blocks)))
        for path, container in module.named_modules()
        if isinstance(container, ReversibleBlocks)
        for run in container.runs
    ]
    return ConversionReport(tuple(runs), _count(module))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
