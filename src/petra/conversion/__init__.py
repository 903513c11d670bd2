"""Networks of other libraries with their residual blocks made reversible."""

from petra.conversion.container import ReversibleBlocks
from petra.conversion.convert import make_reversible
from petra.conversion.report import ConversionReport, conversion_report

__all__ = ["ConversionReport", "ReversibleBlocks", "conversion_report", "make_reversible"]
