"""Training: the trainer, recipes, data, metrics and checkpoints."""

from petra.training.trainer import Evaluation, Trainer

__all__ = ["Evaluation", "Trainer"]
