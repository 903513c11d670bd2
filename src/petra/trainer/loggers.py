"""Loggers: callbacks that send records of metrics to other tools. Only the main rank logs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from petra.trainer.callbacks import Callback

if TYPE_CHECKING:
    from petra.trainer.loop import TrainingLoop


class TensorBoardLogger(Callback):
    """Writes the numbers of all records for TensorBoard.

    Args:
        folder: The folder of the event files; by default, `tensorboard/` in the folder of the training.

    Raises:
        ValueError: If TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._writer: Any = None
        self._create = _tensorboard_writer()

    def on_start(self, loop: TrainingLoop) -> None:
        if loop.is_main:
            folder = self._folder or _folder_of(loop, "tensorboard")
            # TensorBoard no longer shows what was written after the checkpoint.
            self._writer = self._create(str(folder), purge_step=loop.step + 1)

    def on_log(self, loop: TrainingLoop, record: dict[str, Any]) -> None:
        if self._writer is not None:
            for name, value in numbers(record).items():
                self._writer.add_scalar(name, value, record["step"])

    def on_end(self, loop: TrainingLoop) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a record, without the position that they belong to."""
    return {name: value for name, value in record.items() if name != "step" and isinstance(value, int | float)}


def _folder_of(loop: TrainingLoop, name: str) -> Path:
    if loop.folder is None:
        raise ValueError(f"the training has no folder for {name}: give out to fit, or a folder to the logger")
    return loop.folder / name


def _tensorboard_writer() -> Any:
    """Return the class that writes for TensorBoard; raise ValueError if the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "--tensorboard needs a package that is not installed: pip install 'petra[tensorboard]'"
        ) from error
    return SummaryWriter
