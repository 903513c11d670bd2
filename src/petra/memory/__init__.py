"""The fastest training step that fits into a given amount of memory.

Start with `fit.py`, which measures a step with different storages of the layers and chooses. `step_cost.py` measures
one step, `upgrades.py` puts changes of storage into an order, `memory_plan.py` is the result, and `plan_cache.py` keeps
results for the next time. What the storages mean is in `petra.reversible.storage`.
"""

from petra.memory.fit import COMPILED, EAGER, PlanSearch, allocated_bytes, fit_memory
from petra.memory.memory_plan import DoesNotFit, MeasuredPlan, MemoryPlan
from petra.memory.step_cost import StepCost

__all__ = [
    "COMPILED",
    "EAGER",
    "DoesNotFit",
    "MeasuredPlan",
    "MemoryPlan",
    "PlanSearch",
    "StepCost",
    "allocated_bytes",
    "fit_memory",
]
