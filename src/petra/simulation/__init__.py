"""A discrete-event simulation of pipelines: time, idle workers and memory, for up to thousands of workers.

It follows the same schedules as the engine. Imports no PyTorch.

- `costs.py`: the costs of stages, and the cluster of workers;
- `cycle.py`: the repeating part of a schedule, as arrays; `zero_bubble.py` has that of ZBV, for comparison;
- `simulator.py`: the simulation;
- `result.py` and `trace.py`: what it has found, with memory as a function of time; `timeline.py` draws it.

Start with `simulate`.
"""

from petra.simulation.costs import Cluster, LinkSpeed, StageCosts
from petra.simulation.cycle import Cycle, Operation, Step
from petra.simulation.result import Simulation
from petra.simulation.simulator import simulate
from petra.simulation.timeline import draw_timeline
from petra.simulation.trace import Event, Trace
from petra.simulation.zero_bubble import zbv

__all__ = [
    "Cluster",
    "Cycle",
    "Event",
    "LinkSpeed",
    "Operation",
    "Simulation",
    "StageCosts",
    "Step",
    "Trace",
    "draw_timeline",
    "simulate",
    "zbv",
]
