"""Training: the trainer, recipes, data, metrics, checkpoints and trained networks."""

from petra.training.tally import Evaluation
from petra.training.trained import load
from petra.training.trainer import Trainer

__all__ = ["Evaluation", "Trainer", "load"]
