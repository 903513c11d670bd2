"""A data worker that is killed ends the run with one line that says what to do."""

import os
import signal
from functools import partial

import pytest

from petra.cli.main import main
from petra.data.workers import Workers, describe_lost_worker
from petra.runs.run import Run


def end_in_worker(training, task):
    if os.getpid() != training:
        os.kill(os.getpid(), signal.SIGHUP)
    return task


@pytest.mark.slow
def test_a_killed_worker(tmp_path, monkeypatch, capsys):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it

    def read(run):
        source = Workers(partial(end_in_worker, os.getpid()), 1)
        try:
            list(source.run(range(3)))
        finally:
            source.close()
            run.close()

    monkeypatch.setattr(Run, "__call__", read)
    arguments = ["--model", "revnet18", "--width", "2", "--depths", "1,1", "--data", "synthetic:1x4x4:3:48"]
    code = main(["train", *arguments, "--stages", "2", "--device", "cpu", "--out", str(tmp_path / "run")])
    assert code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("petra: error: a worker process that reads data has died (DataLoader worker (pid")
    assert "): continue with --resume; if memory was short, lower --workers" in line


def test_other_errors_are_not_of_workers():
    assert describe_lost_worker(RuntimeError("out of memory")) is None
    assert describe_lost_worker(ValueError("DataLoader worker (pid 3) is killed by signal: Killed. ")) is None
    assert describe_lost_worker(RuntimeError("DataLoader worker (pid(s) 3) exited unexpectedly")) is not None
