"""The soak does its faults, judges what follows, and finds what is wrong."""

import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import fork_server, stand_in_job
from soak import __main__ as command
from soak import expectations, faults, hooks, jobs, leftovers, trials
from soak.expectations import Outcome, judge
from soak.faults import FAULTS, FileLimit, Hook, Moment, Signals
from soak.jobs import JOBS, Job
from soak.trials import Soak, Trial
from torch.distributed import TCPStore

from petra.cli.main import main

TIMEOUT = 5.0


def stand_in(*options):
    return Job("stand-in", options, program=(stand_in_job.__file__,))


@pytest.fixture
def soak(tmp_path):
    lines = []
    found = Soak(tmp_path, TIMEOUT, lines.append)
    found.lines, found._patience, found.limit = lines, 5.0, 5.0
    return found


def signals(kind, *numbers, checkpoint=3, pause=0.0):
    return Signals(kind, "process 0", "stop" not in kind, Moment(checkpoint, 0.0), numbers, pause)


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (signals("kill", signal.SIGKILL), Outcome.ENDED),
        (signals("terminate", signal.SIGTERM), Outcome.ENDED),
        (signals("interrupt", signal.SIGINT), Outcome.ENDED),
        (signals("hang up", signal.SIGHUP), Outcome.ENDED),
        (signals("short stop", signal.SIGSTOP, signal.SIGCONT, pause=0.1), Outcome.RECOVERED),
        (FileLimit("full disk", "process 0", True, Moment(3, 0.0), 5), Outcome.ENDED),
        (signals("kill", signal.SIGKILL, checkpoint=100), Outcome.MISSED),
    ],
    ids=lambda value: value.kind if isinstance(value, faults.Fault) else value.value,
)
def test_a_job_ends_with_the_same_weights(fault, outcome, soak):
    options = () if outcome is Outcome.MISSED else ("--until-fault",)
    trial = Trial(0, 0, stand_in(*options), [fault])
    soak._patience = soak.limit = 30.0  # none of these jobs hangs, but the machine may be busy
    soak.run(trial)
    assert not trial.problems
    assert [event.verdict.outcome for event in trial.events] == [outcome]
    assert not (soak.folder / "0").exists()
    assert any(re.fullmatch(rf" +[\d.]+ s  trial 0:0 \(stand-in\): {fault.kind}, process 0.*", x) for x in soak.lines)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("weights", "the weights are not those of the unbroken run"),
        ("file", "left behind: file weights.safetensors.tmp"),
        ("temporary", "left behind: temporary file left"),
        ("traceback", "printed a traceback"),
        ("process", "did not end"),
        ("hang", "resumed, it ended with None"),
    ],
)
def test_what_goes_wrong_is_found(wrong, problem, soak):
    job = stand_in("--wrong", wrong, "--until-fault")
    soak.complete(job)
    soak.limit = 1.5 if wrong in ("process", "hang") else 5.0
    trial = Trial(0, 0, job, [signals("terminate", signal.SIGTERM)])
    soak.run(trial)
    assert any(problem in found for found in trial.problems), trial.problems
    assert "FAILED" in soak.lines[-1]
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            assert str(soak.folder).encode() not in path.read_bytes()
        except OSError:
            continue


def test_a_fault_waits_longer_on_a_busy_machine(soak):
    trial = Trial(0, 0, stand_in(), [])
    limits = []
    for soak.limit in (5.0, 900.0):
        attempt = soak._start(trial, soak.folder / "0", "one")
        attempt.kill()
        limits.append(attempt.fault_limit)
    assert limits == [jobs.FAULT_LIMIT, 900.0]


def lost(kind, job, code, said, target="process 1", fatal=True):
    return judge(Hook(kind, target, fatal, 3, 0.0), JOBS[job], True, code, said)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("kill", "two", 1, "petra: error: rank 1 is gone or stuck"), None),
        (("kill", "two", 1, "petra: process 1 was ended by SIGKILL"), None),
        (("kill", "replicas", 1, "petra: error: rank 0 of replica 1 is gone"), None),
        (("kill", "two", 0, "went on"), None),
        (("kill", "two", 1, "petra: error: something is wrong"), "does not name process 1"),
        (("kill", "two", 1, ""), "ended with 1 and said nothing"),
        (("kill", "two", 1, "petra: error: rank 1\npetra: error: rank 0"), "printed 2 errors"),
        (("kill", "two", None, ""), "did not end"),
        (("kill", "two", 1, "petra: error: DistNetworkError: rank 1"), "printed the name of an exception"),
        (("kill", "two", -11, ""), "ended by SIGSEGV"),
        (("kill", "two", 130, "petra: stopped"), "stopped, but was not asked to"),
        (("cut connections", "two", 1, "petra: error: rank 1\npetra: error: rank 0"), None),
        (("late message", "two", 1, "petra: error: rank 1", "process 1", False), "ended with 1, but had to go on"),
    ],
)
def test_one_function_says_what_must_follow(given, reason):
    verdict = lost(*given)
    assert (verdict.outcome is Outcome.FAILED) == (reason is not None)
    assert verdict.reason == (reason or "")


def test_trials_are_the_same_for_the_same_seed():
    for number in range(60):
        first, second = (Trial.draw(3, number, TIMEOUT) for _ in range(2))
        assert (first.job, [str(fault) for fault in first.faults]) == (
            second.job,
            [str(fault) for fault in second.faults],
        )
        for fault in first.faults:
            assert fault.target in first.job.targets
    assert {Trial.draw(3, number, TIMEOUT).faults[0].kind for number in range(300)} == set(FAULTS)


def test_the_table_counts_every_outcome_and_the_exit_code_tells(monkeypatch, capsys, tmp_path):
    class Stub(Soak):
        def run(self, trial):
            bad = trial.number == 2
            outcome = Outcome.FAILED if bad else Outcome.ENDED
            trial.events.append(trials.Event(trial.faults[0], expectations.Verdict(outcome), 2.0))
            trial.problems += ["did not end"] if bad else []

    monkeypatch.setattr(command, "Soak", Stub)
    monkeypatch.setattr(command.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    options = ["--faults", "kill", "--jobs", "one", "--seconds", "1e9", "--damage", "0", "--only"]
    assert command.main([*options, "1"]) == 0
    assert "| kill | 1 | 0 | 1 | 0 | 2.0 (2.0) |" in capsys.readouterr().out
    assert command.main([*options, "2"]) == 1
    said = capsys.readouterr().out
    assert "| all | 1 | 0 | 0 | 1 |  |" in said
    assert "trial 0:2 (one) failed: did not end" in said


def test_no_more_trials_than_asked_for(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Soak, "run", lambda self, trial: None)
    monkeypatch.setattr(command.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    assert command.main(["--trials", "3", "--parallel", "2", "--damage", "0", "--seconds", "20"]) == 0
    assert "3 trials, 0 failures" in capsys.readouterr().out


def rank_main(rank, port, arguments, hook, log):
    variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", **hook})
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
    hooks.install()
    sys.exit(main(arguments))


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "goes_on"), [("cut connections", False), ("late message", True), ("slow disk", True)])
def test_faults_inside_a_process(kind, goes_on, tmp_path):
    job = JOBS["two"]
    seconds = 0.1 if kind == "slow disk" else 0.5  # the former for each of about 60 writes
    fault = Hook(kind, "process 1", not goes_on, 9, seconds)
    given = [*replace(job, options=()).arguments(tmp_path / "run", 60.0), "--epochs", "1"]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    hook = fault.environment(tmp_path)
    logs = [tmp_path / f"log{rank}" for rank in range(2)]
    ranks = [fork_server.start(rank_main, rank, store.port, given, hook, logs[rank]) for rank in range(2)]
    for process in ranks:
        process.join(120)
        process.kill()
        process.join()
    said = "".join(log.read_text() for log in logs)
    codes = [process.exitcode for process in ranks]
    assert (tmp_path / "has-happened").exists()
    verdict = judge(fault, job, True, 0 if codes == [0, 0] else 1, said)
    assert verdict.outcome is (Outcome.RECOVERED if goes_on else Outcome.ENDED), (verdict, said)


def test_a_worker_that_a_signal_has_ended_leaves_a_socket(tmp_path):
    (tmp_path / "pymp-1").mkdir()
    (tmp_path / "pymp-1" / "listener-2").touch()
    (tmp_path / "other").touch()
    attempt = SimpleNamespace(temporary=tmp_path)
    assert len(leftovers.temporary_files(attempt)) == 3
    assert leftovers.temporary_files(attempt, worker_ended=True) == ["temporary file other"]
    leftovers.remove_temporary_files(attempt)
    assert leftovers.temporary_files(attempt) == []


def test_a_full_disk_keeps_nobody_from_saying_why(soak):
    trial = Trial(0, 0, stand_in("--until-fault"), [])
    fault = FileLimit("full disk", "process 0", True, Moment(3, 0.0), 0)
    attempt = soak._start(trial, soak.folder / "0", "fault0", fault)
    assert fault.happen(attempt)
    assert attempt.end(30.0) == 2
    assert attempt.said == "petra: error: the checkpoint could not be written (File too large)\n"
