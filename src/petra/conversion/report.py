"""A report of the segments that a conversion made reversible."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from petra.conversion.container import ReversibleBlocks


@dataclass(frozen=True)
class SegmentReport:
    """A segment of blocks that became reversible."""

    path: str
    """The path of its container in the network."""
    names: tuple[str, ...]
    """The names of the blocks in the container."""
    kind: str
    """The class of the blocks."""
    post_norm: bool
    """True if they were post-norm blocks, which became pre-norm blocks."""
    parameters: int
    """The number of parameters of the segment."""

    def __str__(self) -> str:
        where = f"{self.path or 'the network'}[{self.names[0]}{f'…{self.names[-1]}' if len(self.names) > 1 else ''}]"
        norms = ", post-norm, now pre-norm" if self.post_norm else ""
        return f"{where}: {len(self.names)} × {self.kind}{norms}, {self.parameters:,} parameters"


@dataclass(frozen=True)
class ConversionReport:
    """The segments that became reversible, and their share of the network."""

    segments: tuple[SegmentReport, ...]
    """The segments, in the order of the network's modules."""
    parameters: int
    """The number of parameters of the whole network."""

    def __str__(self) -> str:
        if not self.segments:
            return "no converted segments: give the network that make_reversible returned"
        share = sum(segment.parameters for segment in self.segments) / max(self.parameters, 1)
        lines = [f"{len(self.segments)} reversible segment(s), {share:.0%} of {self.parameters:,} parameters"]
        lines += [f"  {segment}" for segment in self.segments]
        unchanged = all(len(segment.names) == 1 and not segment.post_norm for segment in self.segments)
        lines.append(
            "The weights are the same, and so is the function: each segment has only one block."
            if unchanged
            else "The weights are the same, but the network computes a different function: fine-tune it."
        )
        return "\n".join(lines)


def conversion_report(module: nn.Module) -> ConversionReport:
    """Report what `petra.make_reversible` converted.

    Args:
        module: The network that `make_reversible` returned.

    Returns:
        The report; `print` shows it as text.
    """
    segments = [
        SegmentReport(path, s.names, s.kind, s.final_norm is not None, _count(nn.ModuleList(s.blocks)))
        for path, container in module.named_modules()
        if isinstance(container, ReversibleBlocks)
        for s in container.segments
    ]
    return ConversionReport(tuple(segments), _count(module))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
