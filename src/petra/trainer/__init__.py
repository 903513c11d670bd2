"""The trainer: trains a network with any method, from your own script.

Start with `trainer.py`. `validation.py` checks its arguments, `schedules.py` finds pipeline schedules by name,
`state.py` saves and loads stages at any cut, and `evaluation.py` computes loss and accuracy. `defaults.py` chooses what
the caller did not, and `advisor.py` warns about late gradients, by the rules of `stability.py` and `loss_watch.py`.
`optimizers.py`, `lr_schedules.py` and `loss.py` hold the choices of the papers; any optimizer, scheduler and loss of
PyTorch works too. `chunked_loss.py` computes the loss of a language model without all its logits in memory.

`loop.py` is the training loop, and `fit.py` the one of `Trainer.fit`. `sources.py` makes resumable batches of any
iterable; `progress.py`, `metrics.py` and `progress_bar.py` report, `checkpoint_folder.py` saves, `best_weights.py` and
`early_stopping.py` follow evaluations, and `interrupts.py` stops it. `callbacks.py` calls your own code, and
`loggers.py` other tools.
"""

from petra.trainer.callbacks import Callback
from petra.trainer.defaults import TrainingDefaults
from petra.trainer.early_stopping import EarlyStopping
from petra.trainer.evaluation import Evaluation, evaluate_network
from petra.trainer.fit import FitResult
from petra.trainer.interrupts import Interrupted
from petra.trainer.loop import LoopSettings, TrainingLoop
from petra.trainer.loss import cross_entropy
from petra.trainer.stability import StalenessWarning
from petra.trainer.state import weights_hash
from petra.trainer.trainer import Trainer

__all__ = [
    "Callback",
    "EarlyStopping",
    "Evaluation",
    "FitResult",
    "Interrupted",
    "LoopSettings",
    "StalenessWarning",
    "Trainer",
    "TrainingDefaults",
    "TrainingLoop",
    "cross_entropy",
    "evaluate_network",
    "weights_hash",
]
