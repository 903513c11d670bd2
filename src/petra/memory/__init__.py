"""The fastest training step that fits into a given amount of memory.

Start with `fit.py`, which measures a step with different storages of the layers and chooses among them. `step_cost.py`
measures one step, `upgrades.py` orders changes of storage by the time that they save per byte, `memory_plan.py` has the
result, and `plan_cache.py` stores results for later calls. `petra.reversible.storage` explains the storages.
"""

from petra.memory.fit import COMPILED_STORAGES, EAGER_STORAGES, PlanSearch, allocated_bytes, fit_memory
from petra.memory.memory_plan import DoesNotFit, MeasuredPlan, MemoryPlan
from petra.memory.step_cost import StepCost

__all__ = [
    "COMPILED_STORAGES",
    "EAGER_STORAGES",
    "DoesNotFit",
    "MeasuredPlan",
    "MemoryPlan",
    "PlanSearch",
    "StepCost",
    "allocated_bytes",
    "fit_memory",
]
