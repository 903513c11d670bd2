"""Training: the trainer, recipes, data, metrics, checkpoints and trained networks."""

from petra.training.trained import load
from petra.training.trainer import Evaluation, Trainer

__all__ = ["Evaluation", "Trainer", "load"]
