"""PETRA and the other methods in Lightning, by manual optimization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from petra.pipeline import MicrobatchResult
from petra.pipeline.optimizer_factory import OptimizerFactory
from petra.pipeline.stage import Loss
from petra.reversible import Network
from petra.trainer import Trainer
from petra.trainer.loss import count_answers, count_correct

try:
    from lightning.pytorch import LightningModule
except ImportError as error:
    raise ImportError(
        f"petra.integrations.lightning needs lightning ({error}): pip install 'petra[lightning]'"
    ) from error

STATE = "petra"
"""The name of the trainer's state in Lightning's checkpoints."""

_PRECISIONS = {"32-true": None, "64-true": None, "bf16-mixed": torch.bfloat16}
"""Lightning's precisions, and the autocast dtype of the trainer."""


class PetraModule(LightningModule):
    """Trains a network with a `petra.Trainer` inside a Lightning `Trainer`.

    Each batch is one tick of the pipeline: `training_step` calls `petra.Trainer.step`. The pipeline is drained at the
    end of training. The weights are the same, bit for bit, as those of the plain loop `for x, y in batches:
    trainer.step(x, y)` followed by `trainer.drain()`. `global_step` counts updates of the last stage.

    Checkpoints contain the state of the trainer with everything in flight, so training resumes exactly where the data
    loader continues with the same batches. They contain tensors, numbers and strings only, and load with
    `weights_only=True`.

    Logs `train_loss`, `val_loss` and `test_loss`, and `val_accuracy` and `test_accuracy` if targets are classes.
    Subclass it to log more: `training_results` receives the micro-batches that have reached the loss.

    Args:
        network: The layers, as for `petra.Trainer`.
        loss: A function of outputs and targets that returns one number.
        optimizer: Creates the optimizer of a stage from its parameters.
        **options: Other arguments of `petra.Trainer`, such as `method`, `stages`, `scheduler`, `accumulate` and
            `clip_norm`.

    Raises:
        ValueError: If options are given that Lightning decides.

    Example:
        ```python
        module = PetraModule(network, loss=nn.functional.cross_entropy, stages=4,
                             optimizer=lambda p: torch.optim.SGD(p, 0.1))
        lightning.Trainer(max_epochs=10).fit(module, train_loader, test_loader)
        ```
    """

    def __init__(self, network: nn.Sequential, *, loss: Loss, optimizer: OptimizerFactory, **options: Any) -> None:
        super().__init__()
        for name in ("device", "transport", "placement"):
            if name in options:
                raise ValueError(
                    f"{name} is given, but Lightning chooses the device and trains in one process: leave it out, or "
                    "use petra.Trainer without Lightning, with torchrun"
                )
        self.automatic_optimization = False
        self.network = network
        self.loss = loss
        self.options = {"optimizer": optimizer, **options}
        self.petra_trainer: Trainer | None = None
        """The trainer, from the start of `fit` on."""
        self._checkpoint: dict[str, Any] | None = None

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Create the trainer, now that the network is on its device.

        Returns:
            The optimizers of all stages. Lightning reads their learning rates; the trainer steps them.
        """
        if self.trainer.world_size > 1:
            raise ValueError(
                f"Lightning has started {self.trainer.world_size} processes, but PetraModule trains in one: give "
                "devices=1, or use petra.Trainer without Lightning, with torchrun"
            )
        options = dict(self.options)
        precision = str(self.trainer.precision)
        if precision not in _PRECISIONS:
            raise ValueError(f"precision is {precision!r}: give one of {', '.join(map(repr, _PRECISIONS))}")
        options.setdefault("autocast", _PRECISIONS[precision])
        self.petra_trainer = trainer = Trainer(self.network, loss=self.loss, device=self.device, **options)
        return [stage.optimizer for stage in trainer.stages if stage.optimizer is not None]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Run one tick, and log the losses of the micro-batches that have reached the loss."""
        inputs, targets = batch
        trainer = self._running()
        before = trainer.stages[-1].updates
        results = trainer.step(inputs, targets)
        self._count(trainer.stages[-1].updates - before)
        if results:
            self.training_results(results)

    def training_results(self, results: list[MicrobatchResult]) -> None:
        """Log the training loss.

        Args:
            results: The micro-batches that have reached the loss in this tick.
        """
        size = sum(_samples(result.targets) for result in results)
        self.log("train_loss", mean_loss(results), prog_bar=True, batch_size=size)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate a batch with the current weights."""
        self._evaluate("val", *batch)

    def on_validation_model_zero_grad(self) -> None:
        """Keep the gradients that stages have accumulated; Lightning would free them before validation."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate a batch with the current weights."""
        self._evaluate("test", *batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the outputs for a batch; targets, if it has any, are ignored."""
        return self(batch[0] if isinstance(batch, list) else batch)

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Any:
        """Compute outputs in evaluation mode; micro-batches in flight are not disturbed."""
        if self.petra_trainer is not None and self.petra_trainer.device == self.device:
            return self.petra_trainer.predict(inputs)
        modes = {module: module.training for module in self.network.modules()}
        try:
            with torch.no_grad():
                given = inputs if isinstance(inputs, tuple) else (inputs,)
                return Network(*self.network.eval())(*given)
        finally:
            for module, mode in modes.items():
                module.training = mode

    def on_train_start(self) -> None:
        """Continue exactly where the checkpoint was written, if there is one."""
        if self._checkpoint is not None:
            self._running().load_state_dict(self._checkpoint)
            self._checkpoint = None

    def on_train_end(self) -> None:
        """Finish the micro-batches in flight."""
        trainer = self._running()
        before = trainer.stages[-1].updates
        results = trainer.drain()
        self._count(trainer.stages[-1].updates - before)
        if results:
            for logger in self.loggers:  # self.log is not available here
                logger.log_metrics({"train_loss": float(mean_loss(results))}, step=self.trainer.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the state of the trainer, unless only weights are saved."""
        if self.petra_trainer is not None and "optimizer_states" in checkpoint:
            checkpoint[STATE] = self.petra_trainer.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the state until the trainer exists."""
        self._checkpoint = checkpoint.get(STATE)

    def _evaluate(self, part: str, inputs: Any, targets: Any) -> None:
        outputs = self(inputs)
        answers = int(count_answers(outputs, targets, _samples(targets)))
        if answers == 0:
            return  # the mean over no answers is NaN
        self.log(f"{part}_loss", self.loss(outputs, targets), prog_bar=True, batch_size=answers)
        right = count_correct(outputs, targets)
        if right is not None:
            self.log(f"{part}_accuracy", right / answers, prog_bar=True, batch_size=answers)

    def _running(self) -> Trainer:
        if self.petra_trainer is None:
            raise ValueError("there is no petra.Trainer before fit: call lightning.Trainer().fit(module, loader)")
        return self.petra_trainer

    def _count(self, updates: int) -> None:
        """Count updates in `global_step`, as Lightning does when one of its own optimizers is stepped."""
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        for _ in range(updates):
            progress.increment_ready()
            progress.increment_completed()


def mean_loss(results: list[MicrobatchResult]) -> Tensor:
    """Return the mean loss of micro-batches.

    Args:
        results: The micro-batches, at least one.

    Returns:
        The mean, on their device.
    """
    return torch.stack([result.loss.detach() for result in results]).mean()


def _samples(targets: Any) -> int:
    return len(targets) if isinstance(targets, Tensor) and targets.ndim else 1
