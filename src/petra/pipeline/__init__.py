"""Stages of a network, and the executor that runs a schedule on them.

Start with `stage.py` (forward, backward and update of one stage) and `executor.py` (which stage acts when).
`mailbox.py` holds the messages between stages, rounded by the codecs of `compression.py` in the layout of
`message_format.py`; `weight_stash.py` the old weights that some methods need; `weight_average.py` averages of the
weights. `gradient_clipping.py` clips the gradients of all stages by their common norm, and `optimizer_factory.py`
creates optimizers. `partition.py` cuts a network into stages, `build.py` builds them, and `message_shapes.py` infers
the shapes of their messages. `message_layout.py` puts the tensors of a message into one vector of bytes.
"""

from petra.pipeline.activity import Activity
from petra.pipeline.build import StageBuilder
from petra.pipeline.codecs import Codec
from petra.pipeline.executor import Executor
from petra.pipeline.gradient_clipping import GlobalClipping
from petra.pipeline.hooks import Observer, TickRunner
from petra.pipeline.mailbox import LocalMailbox, Mailbox
from petra.pipeline.message_format import MessageFormat
from petra.pipeline.message_shapes import ShapeInference
from petra.pipeline.partition import PartitionDoesNotFit, assign, balance, partition
from petra.pipeline.results import Diverged, MicrobatchResult, NonFiniteLoss
from petra.pipeline.stage import Stage
from petra.pipeline.weight_average import WeightAverage

__all__ = [
    "Activity",
    "Codec",
    "Diverged",
    "Executor",
    "GlobalClipping",
    "LocalMailbox",
    "Mailbox",
    "MessageFormat",
    "MicrobatchResult",
    "NonFiniteLoss",
    "Observer",
    "PartitionDoesNotFit",
    "ShapeInference",
    "Stage",
    "StageBuilder",
    "TickRunner",
    "WeightAverage",
    "assign",
    "balance",
    "partition",
]
