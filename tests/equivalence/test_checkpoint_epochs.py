"""Checkpoints after every N-th epoch: fewer are written, and a run that dies goes on from the last one."""

import json
from types import SimpleNamespace

import pytest

from petra.runs.config import RunConfig
from petra.runs.run import Run
from petra.trainer.loggers import TensorBoardLogger
from petra.trainer.metrics import MetricsLog

pytestmark = pytest.mark.slow

OPTIONS = {"model": "revnet18", "model_options": {"width": 4, "depths": [1]}, "data": "synthetic:1x4x4:3:40"}
OPTIONS |= {"stages": 3, "batch_size": 10, "epochs": 5, "lr": 0.01, "warmup_epochs": 1.0}


class Died(Exception):
    pass


class Watched(Run):
    """Notes the epochs of its checkpoints, and dies in a tick of an epoch."""

    dies_in = None

    def _save(self, wait=True):
        self.saved = [*getattr(self, "saved", []), self.progress.epoch]
        super()._save(wait)

    def _tick(self, *arguments):
        if self.progress.epoch == self.dies_in and self.progress.batch == 2:
            raise Died
        return super()._tick(*arguments)


def config(every):
    return RunConfig.from_options(None, {**OPTIONS, "checkpoint_epochs": every})


@pytest.mark.parametrize(("every", "saved"), [(1, [1, 2, 3, 4, 5, 5]), (2, [2, 4, 5, 5]), (9, [5, 5])])
def test_which_epochs_are_saved(tmp_path, every, saved):
    run = Watched(config(every), tmp_path / "run", quiet=True)
    run()
    assert run.saved == saved  # the last time as finished


def test_a_run_that_dies_goes_on_from_the_last_one(tmp_path):
    whole = Run(config(2), tmp_path / "whole", quiet=True)()
    run = Watched(config(2), tmp_path / "run", quiet=True)
    run.dies_in = 3
    with pytest.raises(Died):
        run()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    again = Watched(config(2), tmp_path / "run", resume=True, quiet=True)
    assert again.progress.epoch == 2
    assert again()["weights_sha256"] == whole["weights_sha256"]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records] == [1, 2, 3, 4, 5]


def test_metrics_that_are_lost_leave_no_gap(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for keep, kept in ((0, [1]), (1000, [1, 2])):  # as much as the checkpoint knows of, more than is there
        log = MetricsLog(file, keep)
        log.write({"step": kept[-1], "epoch": kept[-1]})
        log.close()
        assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == kept


def test_none_at_all_is_refused():
    with pytest.raises(ValueError, match="--checkpoint-epochs is 0: give 1 or more"):
        config(0).validate()


def test_a_board_shows_what_a_checkpoint_has_and_nothing_that_came_after_it(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    for begun, steps in ((0, [5, 7]), (5, [8])):
        logger, loop = TensorBoardLogger(tmp_path / "board"), SimpleNamespace(is_main=True, step=begun)
        logger.on_start(loop)
        for step in steps:
            logger.on_log(loop, {"step": step, "lr": 0.1})
        logger.on_end(loop)
    assert [found.step for found in accumulator(str(tmp_path / "board")).Reload().Scalars("lr")] == [5, 8]
