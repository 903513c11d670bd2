"""Measurements of training and predictions from them: memory, time, gradients, and plans for several ranks.

Everything here observes an executor from outside, and does not change the training.

- Memory: `stage_memory.py` counts the bytes of every stage, `activations.py` its activations at their peak, and
  `memory_estimate.py` predicts both on the meta device.
- Time: `profile.py` measures layers, `tick_time.py` predicts ticks from it, and `timeline.py` traces the actions of all
  ranks.
- Gradients: `gradient_fidelity.py` compares those of a method with exact ones, in the metrics of
  `gradient_similarity.py`.
- Plans: `planner.py` decides which layers each rank holds, with `partition_search.py` for memory limits.
  `stage_costs.py` counts what `petra.simulation` needs, and `slow_links.py` chooses numbers in flight for slow links.
- Figures: `memory_figure.py`, `similarity_figure.py` and `run_figure.py` plot results.
- `environment.py` describes the code and hardware of a measurement.

Start with `stage_memory.py`, or with `planner.py` for how the parts work together.
"""

from petra.measure.activations import Activations
from petra.measure.environment import environment
from petra.measure.gradient_fidelity import Fidelity, Measurement
from petra.measure.gradient_similarity import GradientSimilarity
from petra.measure.memory_estimate import MemoryEstimator
from petra.measure.planner import Plan, make_plan
from petra.measure.profile import Profile, Seconds, Stopwatch, profile
from petra.measure.slow_links import PipelineOverLinks
from petra.measure.stage_costs import StageCounter
from petra.measure.stage_memory import MemoryProbe, StageMemory, at_rest, nbytes
from petra.measure.tick_time import Link, tick_seconds
from petra.measure.timeline import Timeline, Trace

__all__ = [
    "Activations",
    "Fidelity",
    "GradientSimilarity",
    "Link",
    "Measurement",
    "MemoryEstimator",
    "MemoryProbe",
    "PipelineOverLinks",
    "Plan",
    "Profile",
    "Seconds",
    "StageCounter",
    "StageMemory",
    "Stopwatch",
    "Timeline",
    "Trace",
    "at_rest",
    "environment",
    "make_plan",
    "nbytes",
    "profile",
    "tick_seconds",
]
