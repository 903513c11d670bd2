"""Petra trains reversible neural networks in parallel.

The names of `petra.__all__` are imported on first use, so that `import petra` and `petra --help` do not wait for
PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from petra import models, optim
    from petra.conversion import ConversionReport, as_network, conversion_report, make_reversible, set_blend
    from petra.distributed import JobFailed, LostRank
    from petra.memory import DoesNotFit, MemoryPlan, fit_memory
    from petra.methods import METHODS, LayerError, Method
    from petra.pipeline import Diverged, MicrobatchResult, NonFiniteLoss
    from petra.reversible import (
        AdditiveCoupling,
        AffineCoupling,
        FixedPointCoupling,
        InjectiveStem,
        Invertibility,
        InvertibleDownsampling,
        Network,
        ReversibleBlock,
        ReversibleLayer,
        ReversibleResidual,
        check_invertible,
        pareprop,
        plain_autograd,
    )
    from petra.runs import load
    from petra.schedule import Deadlock, ScheduleError
    from petra.trainer import Callback, EarlyStopping, Evaluation, FitResult, Interrupted, StalenessWarning, Trainer

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "AdditiveCoupling",
    "AffineCoupling",
    "Callback",
    "ConversionReport",
    "Deadlock",
    "Diverged",
    "DoesNotFit",
    "EarlyStopping",
    "Evaluation",
    "FitResult",
    "FixedPointCoupling",
    "InjectiveStem",
    "Interrupted",
    "Invertibility",
    "InvertibleDownsampling",
    "JobFailed",
    "LayerError",
    "LostRank",
    "MemoryPlan",
    "Method",
    "MicrobatchResult",
    "Network",
    "NonFiniteLoss",
    "ReversibleBlock",
    "ReversibleLayer",
    "ReversibleResidual",
    "ScheduleError",
    "StalenessWarning",
    "Trainer",
    "__version__",
    "as_network",
    "check_invertible",
    "conversion_report",
    "fit_memory",
    "load",
    "make_reversible",
    "models",
    "optim",
    "pareprop",
    "plain_autograd",
    "set_blend",
]

_PACKAGES = {
    "conversion": ("ConversionReport", "as_network", "conversion_report", "make_reversible", "set_blend"),
    "distributed": ("JobFailed", "LostRank"),
    "memory": ("DoesNotFit", "MemoryPlan", "fit_memory"),
    "methods": ("METHODS", "LayerError", "Method"),
    "pipeline": ("Diverged", "MicrobatchResult", "NonFiniteLoss"),
    "runs": ("load",),
    "schedule": ("Deadlock", "ScheduleError"),
    "trainer": ("Callback", "EarlyStopping", "Evaluation", "FitResult", "Interrupted", "StalenessWarning", "Trainer"),
}
"""The packages that define the names above; the others are in `petra.reversible`."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("models", "optim"):
        return import_module(f"petra.{name}")
    package = next((package for package, names in _PACKAGES.items() if name in names), "reversible")
    value = getattr(import_module(f"{__name__}.{package}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
