"""The trainer: trains a network with any method, from your own script.

Start with `trainer.py`. `validation.py` checks its arguments, `schedules.py` finds pipeline schedules by name,
`state.py` saves and loads stages at any cut, and `evaluation.py` computes loss and accuracy. `optimizers.py`,
`lr_schedules.py` and `loss.py` hold the choices of the papers; any optimizer, scheduler and loss of PyTorch works too.
`chunked_loss.py` computes the loss of a language model without all its logits in memory.
"""

from petra.trainer.evaluation import Evaluation, evaluate_network
from petra.trainer.loss import cross_entropy
from petra.trainer.trainer import Trainer, weights_hash

__all__ = ["Evaluation", "Trainer", "cross_entropy", "evaluate_network", "weights_hash"]
