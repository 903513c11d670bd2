"""Loggers: callbacks that send records of metrics to other tools. Only the main rank logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from petra.formatting import unknown
from petra.trainer.callbacks import Callback
from petra.trainer.checkpoint import write_bytes, write_json
from petra.trainer.metrics import parse_records

if TYPE_CHECKING:
    from petra.trainer.loop import TrainingLoop


class JsonLogger(Callback):
    """Writes all records as lines of JSON into a file. `metrics.jsonl` in the folder of a training is such a file.

    Args:
        file: The file. A training that continues removes the lines that came after its checkpoint.
    """

    def __init__(self, file: str | Path) -> None:
        self._file = Path(file)

    def on_start(self, loop: TrainingLoop) -> None:
        if loop.is_main:
            remedy = "remove it to start a new one"
            content = self._file.read_bytes() if self._file.exists() and loop.step > 0 else b""
            records = parse_records(self._file, content, remedy)
            kept = [json.dumps(record) + "\n" for record in records if record.get("step", 0) <= loop.step]
            write_bytes(self._file, "".join(kept).encode())

    def on_log(self, loop: TrainingLoop, record: dict[str, Any]) -> None:
        if loop.is_main:
            with self._file.open("a") as file:
                file.write(json.dumps(record) + "\n")


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
        self._create = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter

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


class WandbLogger(Callback):
    """Sends the numbers of all records to Weights & Biases. `WANDB_MODE=offline` writes them into files instead.

    Args:
        project: The project.
        **options: Further arguments of `wandb.init`.

    Raises:
        ValueError: If wandb is not installed.
    """

    def __init__(self, project: str = "petra", **options: Any) -> None:
        self._wandb = _module("wandb", "wandb")
        self._project, self._options = project, options
        self._run: Any = None

    def on_start(self, loop: TrainingLoop) -> None:
        if not loop.is_main:
            return
        known = _read(loop, "wandb.json")
        quiet = self._wandb.Settings(silent=True)  # progress has a place of its own
        options = {"dir": None if loop.folder is None else str(loop.folder), "settings": quiet} | self._options
        if known is not None:
            options |= {"id": known, "resume": "allow"}  # the same curves continue
        self._run = self._wandb.init(project=self._project, config=loop.describe(), **options)
        _write(loop, "wandb.json", self._run.id)

    def on_log(self, loop: TrainingLoop, record: dict[str, Any]) -> None:
        if self._run is not None:
            self._run.log(numbers(record), step=record["step"])

    def on_end(self, loop: TrainingLoop) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if loop.progress.finished else 1)
            self._run = None


class MLflowLogger(Callback):
    """Sends the numbers of all records to MLflow.

    Args:
        experiment: The name of the experiment.
        tracking_uri: Where MLflow keeps its runs; by default, what MLflow is configured for, such as
            `MLFLOW_TRACKING_URI`.

    Raises:
        ValueError: If MLflow is not installed.
    """

    def __init__(self, experiment: str = "petra", tracking_uri: str | None = None) -> None:
        client = _module("mlflow", "mlflow").MlflowClient
        self._connect: Callable[[], Any] = lambda: client(tracking_uri=tracking_uri)
        self._experiment = experiment
        self._client: Any = None
        self._run = ""

    def on_start(self, loop: TrainingLoop) -> None:
        if not loop.is_main:
            return
        self._client = self._connect()
        known = _read(loop, "mlflow.json")
        if known is not None:
            self._run = known
            self._client.update_run(known, "RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        identity = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._run = self._client.create_run(identity, run_name=loop.folder.name if loop.folder else None).info.run_id
        for name, value in loop.describe().items():
            self._client.log_param(self._run, name, value)
        _write(loop, "mlflow.json", self._run)

    def on_log(self, loop: TrainingLoop, record: dict[str, Any]) -> None:
        if self._client is not None:
            for name, value in numbers(record).items():
                self._client.log_metric(self._run, name, value, step=record["step"])

    def on_end(self, loop: TrainingLoop) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run, "FINISHED" if loop.progress.finished else "FAILED")
            self._client = None


LOGGERS: dict[str, Callable[[], Callback]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MLflowLogger,
}
"""The loggers that have a name on the command line."""


def make_logger(name: str) -> Callback:
    """Return a logger with its default settings.

    Args:
        name: Its name.

    Returns:
        The logger.

    Raises:
        ValueError: If there is none with this name, or its package is not installed.
    """
    if name not in LOGGERS:
        raise unknown("logger", name, LOGGERS)
    return LOGGERS[name]()


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a record that are numbers, without the step that they belong to.

    Args:
        record: The record.

    Returns:
        The numbers by name.
    """
    return {name: value for name, value in record.items() if name != "step" and isinstance(value, int | float)}


def _folder_of(loop: TrainingLoop, name: str) -> Path:
    if loop.folder is None:
        raise ValueError(f"the training has no folder for {name}: give out to fit, or a folder to the logger")
    return loop.folder / name


def _read(loop: TrainingLoop, name: str) -> str | None:
    """Return the identity under which a training that continues was logged before."""
    if loop.folder is None or loop.step == 0 or not (loop.folder / name).exists():
        return None
    try:
        return str(json.loads((loop.folder / name).read_bytes())["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{loop.folder / name} is damaged ({error}): remove it to log as a new run") from error


def _write(loop: TrainingLoop, name: str, identity: str) -> None:
    if loop.folder is not None:
        write_json(loop.folder / name, {"id": identity})


def _module(name: str, extra: str) -> Any:
    """Return an optional module; raise ValueError if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(
            f"the {extra} logger needs a package that is not installed: pip install 'petra[{extra}]'"
        ) from error
