"""Lost processes of `petra train --ranks` are replaced, and the run ends with the weights of an unbroken one."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from helpers import fork_server
from helpers.forked_jobs import ForkFromHere

from petra.distributed import Recovery, launch
from petra.distributed.launch import Launcher
from petra.distributed.membership import DONE, Membership

SMALL = [
    *("train", "--model", "revnet18", "--width", "4", "--depths", "1,1", "--stages", "4"),
    *("--data", "synthetic:1x8x8:10:200", "--batch-size", "8", "--epochs", "2", "--lr", "0.05"),
    *("--warmup-epochs", "1", "--threads", "1", "--device", "cpu", "--checkpoint-epochs", "9"),
    *("--comm-dtype", "streams=bf16,gradients=int8", "--seed", "6"),
]
LIMIT = 240


def weights(folder):
    return json.loads((folder / "summary.json").read_text())["weights_sha256"]


def best(folder):
    return (folder / "best.safetensors").read_bytes()


def job(arguments, fault, log):
    """The whole job, in a process that can be ended."""
    from petra.cli.main import main

    os.environ.update({"OMP_NUM_THREADS": "1", "PETRA_FAULT": fault})
    launch.ForkServer = ForkFromHere
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
    sys.exit(main([*SMALL, *map(str, arguments)]))


def run(folder, *arguments, fault=""):
    log = folder.with_suffix(".log")
    process = fork_server.start(job, [*arguments, "--out", folder], fault, str(log))
    process.join(LIMIT)
    said = log.read_text()
    process.kill()
    assert process.exitcode == 0, said
    return said


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(folder)
    assert json.loads((folder / "summary.json").read_text())["best_epoch"] == 1  # later losses must keep its weights
    return folder


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize(
    ("arguments", "fault", "says", "repeated"),
    [
        (("--ranks", 2), "kill:1:27", "process 1 was ended by SIGKILL: another one takes its place", 12),
        (("--ranks", 2, "--replacements", 0, "--spares", 1), "kill:0:3", "another one takes its place", 5),
        (("--ranks", 2, "--timeout", 2), "stop:0:17", "rank 0 is gone or stuck", 12),
        (("--ranks", 2, "--timeout", 2), "hang:1:30", "rank 1 is stuck in tick", 12),
        (("--ranks", 2), "corrupt:0:20", "a message or a connection was lost: all processes connect again", 12),
        (("--ranks", 2), "cut:1:20", "a message or a connection was lost: all processes connect again", 12),
        (("--ranks", 4, "--replacements", 0), "kill:2:20", "the other processes take over its stages", 14),
        (("--ranks", 2, "--replacements", 0), "kill:1:20", "the other processes take over its stages", 12),
        (("--ranks", 4), "kill:1:25,kill:3:25", "another one takes its place", 14),
        (("--ranks", 4), "kill:1:25,kill:2:25", "another one takes its place", 100),  # neighbours
        (("--ranks", 4, "--timeout", 3), "kill:1:25,stop:3:25", "another one takes its place", 14),
        (("--ranks", 2), "kill-start:1:0", "another one takes its place", 0),  # there are files, but no tick
        (("--ranks", 4), "kill:1:45,kill-restore:3:45", "process 3 was ended by SIGKILL", 14),  # after the best epoch
    ],
)
def test_a_lost_process_is_replaced(arguments, fault, says, repeated, alone, tmp_path):
    """The job goes on from a snapshot that is not older than asked for, but for what ranks are ahead of each other."""
    said = run(tmp_path / "run", *arguments, "--snapshot-every", 10, fault=fault)
    assert says in said
    assert weights(tmp_path / "run") == weights(alone)
    assert best(tmp_path / "run") == best(alone)
    starts = [int(found) for found in re.findall(r"continuing from micro-batch (\d+)", said)]
    ticks = [int(tick) for tick in re.findall(r":(\d+)(?:,|$)", fault)]
    assert min(starts) >= min(ticks) - repeated


@pytest.mark.timeout(LIMIT)
def test_a_lost_replica_gets_its_weights_from_its_twin(tmp_path):
    run(tmp_path / "unbroken", "--ranks", 2, "--replicas", 2)
    said = run(tmp_path / "run", "--ranks", 2, "--replicas", 2, "--snapshot-every", 10, fault="kill:1:17")
    assert said.count("takes its place") >= 1
    assert weights(tmp_path / "run") == weights(tmp_path / "unbroken")


class TestLauncher:
    """The decisions of the launcher, with processes that do nothing."""

    def launcher(self, script, processes=2, replicas=1, **recovery):
        def start(variables):
            return subprocess.Popen(["sh", "-c", script], env={**os.environ, **variables})

        return Launcher(start, processes, replicas, Recovery(**recovery))

    def test_a_job_without_progress_ends(self, monkeypatch, capfd):
        launcher = self.launcher('if [ "$RANK" = 0 ]; then exec sleep 1; else kill -9 $$; fi')
        monkeypatch.setattr(launch, "PATIENCE", 0.1)
        monkeypatch.setattr(launch, "LOSS_WINDOW", 0.0)
        assert launcher.run() == 1
        launcher.kill_all()
        said = capfd.readouterr().err
        assert said.count("another one takes its place") == 3
        assert "the job ends, because it has lost processes 4 times without progress; --resume continues" in said

    def test_a_job_that_makes_progress_between_losses_goes_on(self, monkeypatch, capfd):
        launcher = self.launcher("exit 0")
        monkeypatch.setattr(launch, "LOSS_WINDOW", 0.0)
        membership = Membership(launcher._store, 0)
        for progress in (30, 60, 20, 50, 40):  # less where all have started again from a checkpoint
            membership.report_progress(progress)
            assert launcher._may_go_on("process 1 was lost")
        assert [launcher._may_go_on("process 1 was lost") for _ in range(3)] == [True, True, False]
        assert "lost processes 4 times without progress" in capfd.readouterr().err

    def test_who_ends_after_the_work_is_not_lost(self, monkeypatch, capfd):
        launcher = self.launcher('if [ "$RANK" = 0 ]; then exec sleep 1; else kill -9 $$; fi')
        monkeypatch.setattr(launch, "PATIENCE", 0.1)
        launcher._store.set(DONE, "")
        assert launcher.run() == 1
        launcher.kill_all()
        assert "takes its place" not in capfd.readouterr().err

    def test_without_replacements_and_with_too_few_processes_for_the_replicas_it_ends(self, monkeypatch, capfd):
        script = 'if [ "$RANK" = 0 ]; then exec sleep 1; else kill -9 $$; fi'
        launcher = self.launcher(script, replicas=2, replacements=0)
        monkeypatch.setattr(launch, "PATIENCE", 0.1)
        assert launcher.run() == 1
        launcher.kill_all()
        assert "no process can take over" in capfd.readouterr().err

    def test_a_spare_that_is_used_is_replaced_by_a_new_one(self, capfd):
        script = 'if [ "$RANK" = 1 ]; then kill -9 $$; else exec sleep 0.5; fi'
        launcher = self.launcher(script, spares=1, replacements=1)
        assert launcher.run() == 0
        launcher.kill_all()
        assert launcher._roster.members == (0, 2)
        assert launcher._spares == [3]
        assert "another one takes its place" in capfd.readouterr().err

    def test_a_process_that_is_set_aside_is_used_later(self, monkeypatch, capfd):
        script = 'case "$RANK" in 0) sleep 0.5; kill -9 $$;; 1) kill -9 $$;; *) exec sleep 1;; esac'
        launcher = self.launcher(script, processes=4, replicas=2, replacements=0)
        monkeypatch.setattr(launch, "LOSS_WINDOW", 0.0)
        assert launcher.run() == 0
        launcher.kill_all()
        said = capfd.readouterr().err
        assert "process 1 was ended by SIGKILL: the other processes take over its stages" in said
        assert "process 0 was ended by SIGKILL: another one takes its place" in said
        assert launcher._roster.members == (3, 2)

    def test_a_process_is_started_for_a_suspect_and_ended_when_that_comes_back(self, monkeypatch):
        launcher = self.launcher("exec sleep 100", replacements=3)
        launcher._start(), launcher._start()
        membership = Membership(launcher._store, 0)
        try:
            for _ in range(3):
                membership.report_suspects(launcher._roster, [1])
                launcher._read_reports()
                launcher._end_early()
            assert launcher._spares == [2]
            assert launcher._replacements == 2
            monkeypatch.setattr(launch, "SUSPICION_WINDOW", 0.0)
            launcher._end_early()
            assert launcher._spares == []
            assert launcher._replacements == 3
            assert launcher._started[2].poll() == -signal.SIGKILL
            launcher._read_reports()  # nothing is reported
            assert len(launcher._started) == 3
        finally:
            launcher.kill_all()

    def test_a_process_that_was_started_for_a_suspect_takes_its_place(self, monkeypatch, capfd):
        launcher = self.launcher("exec sleep 100", replacements=3)
        launcher._start(), launcher._start()
        membership = Membership(launcher._store, 0)
        try:
            membership.report_suspects(launcher._roster, [1])
            membership.report_lost(launcher._roster, 1, "rank 1 is stuck")
            launcher._read_reports()
            assert launcher._spares == [2]
            codes = launcher._codes()
            assert codes == {0: None, 1: -signal.SIGKILL}
            assert launcher._recover([1], codes)
            monkeypatch.setattr(launch, "SUSPICION_WINDOW", 0.0)
            launcher._end_early()
            assert launcher._roster.members == (0, 2)
            assert launcher._started[2].poll() is None
            assert launcher._replacements == 2
        finally:
            launcher.kill_all()

    def test_an_error_of_a_process_is_not_a_loss(self, capfd):
        launcher = self.launcher('if [ "$RANK" = 0 ]; then exit 2; else exit 1; fi')
        assert launcher.run() == 2
        assert capfd.readouterr().err == ""

    def test_after_a_signal_nothing_is_replaced(self, monkeypatch, capfd):
        launcher = self.launcher("exec sleep 100")
        monkeypatch.setattr(launch, "PATIENCE", 0.1)
        start = launcher._start

        def start_and_stop():
            number = start()
            if number == 1:
                launcher.stop(signal.SIGTERM, None)
            return number

        monkeypatch.setattr(launcher, "_start", start_and_stop)
        assert launcher.run() == 130
        launcher.kill_all()
        assert "takes its place" not in capfd.readouterr().err
