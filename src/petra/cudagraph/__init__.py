"""Ticks as CUDA graphs: the tick of a full pipeline is captured once, and then launched for every micro-batch.

Start with `tick_capture.py`; `rank_capture.py` does the same on one of several ranks. `eligibility.py` says which
pipelines cannot be captured, `guards.py` what a captured tick assumes, `steady_state.py` and `ring_buffers.py` keep
what waits between ticks in static memory, `lr_tensor.py` keeps learning rates in device memory, and `graph_capture.py`
captures with one CUDA stream per branch.
"""

from petra.cudagraph.graph_capture import CudaGraphCapture, GraphCapture
from petra.cudagraph.rank_capture import RankTickCapture
from petra.cudagraph.tick_capture import TickCapture

__all__ = ["CudaGraphCapture", "GraphCapture", "RankTickCapture", "TickCapture"]
