"""Jobs of several processes from the command line: they agree with one process, and none of them dies unnoticed."""

import errno
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
import weakref
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import faulty_petra, fork_server
from helpers.forked_jobs import ForkFromHere, torchrun
from torch.distributed import TCPStore

from petra.cli.main import main
from petra.distributed import job, launch, resilient, watchdog
from petra.distributed.membership import Roster
from petra.pipeline.message_layout import layout_of
from petra.schedule import Action, Kind

pytestmark = pytest.mark.slow

SMALL = [
    *("train", "--model", "revnet18", "--width", "4", "--depths", "1,1", "--stages", "4"),
    *("--data", "synthetic:1x8x8:10:359"),  # for which nothing has to be imported; the last micro-batch is smaller
    *("--batch-size", "16", "--epochs", "2", "--lr", "0.05", "--warmup-epochs", "1", "--threads", "1"),
    *("--device", "cpu", "--quiet", "--checkpoint-every", "2", "--timeout", "60"),
]
LIMIT = 120
FAULTY = ("-m", "helpers.faulty_petra")
TESTS = str(Path(__file__).parents[1])
PATHS = os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])


def start(*arguments, fault="", program=FAULTY):
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PETRA_FAULT": fault, "PYTHONPATH": PATHS}
    command = [sys.executable, *program, *SMALL, *map(str, arguments)]
    return subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def end(process):
    """Wait for a job; exit code and what it said. No process of it is left, for each holds the pipe it speaks into."""
    try:
        _, error = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:  # time is up
            for pid in processes_below(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.kill()
    return process.returncode, error


def start_launcher(*arguments, fault="", patience=launch.PATIENCE):
    """As `start`, in processes that have everything imported already."""
    return start_with_pipe(launcher_main, [*SMALL, *map(str, arguments)], fault, patience)


def start_torchrun(*arguments, fault=""):
    """Two processes of torchrun, which have everything imported already."""
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    return start_with_pipe(torchrun_main, [*options, *FAULTY, *SMALL, *map(str, arguments)], fault)


def start_with_pipe(target, *arguments):
    hears, is_main = multiprocessing.Pipe(duplex=False)
    process = fork_server.start(target, is_main, *arguments)
    is_main.close()
    return process, hears


def launcher_main(is_main, arguments, fault, patience):
    speak_into(is_main, fault)
    launch.PATIENCE, launch.ForkServer = patience, ForkFromHere
    sys.exit(faulty_petra.main(arguments))


def torchrun_main(is_main, arguments, fault):
    speak_into(is_main, fault)
    torchrun(*arguments)


def speak_into(is_main, fault):
    os.environ.update({"OMP_NUM_THREADS": "1", "PETRA_FAULT": fault, "PYTHONPATH": PATHS})
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(is_main.fileno(), 2)
    is_main.close()


def end_launcher(process, hears):
    """As `end`."""
    said = b""
    try:
        while hears.poll(LIMIT) and (more := os.read(hears.fileno(), 4096)):
            said += more
        process.join(LIMIT)
    finally:
        if process.is_alive():  # time is up
            for pid in processes_below(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.kill()
    return process.exitcode, said.decode()


def processes_below(pid):
    """Those started by a process, by what the system says about parents."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(path.parent.name))
    return found


def run(*arguments, **options):
    code, error = end(start(*arguments, **options))
    assert code == 0, error
    return error


def result(folder):
    """Weights, and metrics without the speed."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [
        {k: v for k, v in json.loads(line).items() if k not in ("samples_per_second", "seconds")} for line in lines
    ]
    return summary["weights_sha256"], summary["test_accuracy"], records


def start_ranks(logs, *arguments, fault=""):
    """Two ranks in processes that have everything imported already; they write errors into ``logs``."""
    given = [*SMALL, *map(str, arguments)]
    return start_two(rank_main, lambda rank: (given, fault, logs[rank]))


def start_two(target, arguments):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [fork_server.start(target, rank, store.port, *arguments(rank)) for rank in range(2)], store


def become_rank(rank, port):
    variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


def rank_main(rank, port, arguments, fault, log):
    become_rank(rank, port)
    os.environ["PETRA_FAULT"] = fault
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
    sys.exit(faulty_petra.main(arguments))


def together(folder, *arguments, fault=""):
    """A job of two ranks: their exit codes, and what they said."""
    logs = [folder.parent / f"log.{rank}" for rank in range(2)]
    ranks, _store = start_ranks(logs, *arguments, "--out", folder, fault=fault)
    for process in ranks:
        process.join(LIMIT)
        process.kill()
    return [process.exitcode for process in ranks], "".join(log.read_text() for log in logs)


def go_on(folder, *arguments):
    """Continue a job of two ranks to its end."""
    codes, error = together(folder, *arguments, "--resume")
    assert codes == [0, 0], error


def meet_slowly(rank, port, slow, folder):
    """Joins a job and leaves, with a rank that is late with its connections."""
    become_rank(rank, port)
    if rank == slow:
        connect = job.ProcessTransport

        def connect_slowly(*given):
            transport = connect(*given)
            time.sleep(0.5)
            (folder / "connected").touch()
            return transport

        job.ProcessTransport = connect_slowly
    with job.join(torch.device("cpu")):
        assert (folder / "connected").exists()


@pytest.mark.parametrize("slow", [0, 1])
def test_nobody_can_fail_while_another_still_connects(slow, tmp_path):
    meet(meet_slowly, slow, tmp_path)


def come_and_go(rank, port):
    """Joins one job after the other. While it is in one, PyTorch puts the rank before every line of an error."""
    become_rank(rank, port)
    alone = sys.excepthook
    for number in range(2):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        with job.join(torch.device("cpu")):
            assert sys.excepthook is not alone
        assert sys.excepthook is alone
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "2"
    with job.join(torch.device("cpu")):
        sys.excepthook = print  # the program's own, which stays
    assert sys.excepthook is print


def test_a_job_that_is_left_no_longer_shows_in_errors():
    meet(come_and_go)


def leave_alone(rank, port, early):
    """The other rank dies while this one leaves, at the end or early."""
    become_rank(rank, port)

    def work():
        with job.join(torch.device("cpu"), timeout=60, early_exit=(KeyError,)):
            if rank == 1:
                os._exit(0)
            if early:
                raise KeyError

    with pytest.raises(job.JobFailed, match="rank 1 is gone or stuck: last heard from in tick 0"):
        work()
    os._exit(0)  # the connections to the other would keep it


@pytest.mark.parametrize("early", [False, True])
def test_who_is_gone_is_named_to_the_last_moment(early):
    meet(leave_alone, early)


def fail_to_write(rank, port):
    """One rank cannot write; the error of the system does not say which."""
    become_rank(rank, port)

    def work():
        with job.join(torch.device("cpu"), timeout=60) as transport:
            if rank == 1:
                raise OSError(errno.ENOSPC, "No space left", "metrics.jsonl")
            transport.gather(None)

    if rank == 1:
        with pytest.raises(OSError, match=r"^rank 1: \[Errno 28\] No space left: 'metrics.jsonl'$"):
            work()
    else:
        with pytest.raises(job.ReportedElsewhere):
            work()
    os._exit(0)  # the connections to the other would keep it


def test_the_rank_that_cannot_write_is_named():
    meet(fail_to_write)


@pytest.mark.parametrize(("position", "error"), [(0, job.JobFailed), (1, job.ReportedElsewhere)])
def test_a_launcher_that_is_gone_is_reported_once_and_is_no_error_of_the_network(position, error, monkeypatch):
    @contextmanager
    def join(*given, **options):
        raise dist.DistNetworkError("Broken pipe")
        yield

    monkeypatch.setenv("PETRA_MEMBER", "0")
    monkeypatch.setattr(resilient, "StoreConnection", lambda *given: None)
    monkeypatch.setattr(resilient.Membership, "wait", lambda *given: Roster(0, (0,) if position == 0 else (1, 0)))
    monkeypatch.setattr(resilient, "join", join)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # `run_in_job` sets them
        monkeypatch.setenv(name, "0")
    reason = "the process that started the job is gone" if position == 0 else "another process"
    with pytest.raises(error, match=reason):
        resilient.run_in_job(lambda *given: None, torch.device("cpu"))


def wait_at_the_store(rank, port):
    """One rank waits in the process group's store for longer than a rank may be silent."""
    become_rank(rank, port)
    with job.join(torch.device("cpu"), timeout=1):
        if rank == 1:
            time.sleep(4)
        dist.new_group([0, 1])


def test_a_rank_that_waits_at_the_store_is_not_taken_for_dead():
    meet(wait_at_the_store)


def meet(target, *arguments):
    ranks, _store = start_two(target, lambda rank: arguments)
    for process in ranks:
        process.join(LIMIT)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]


def messages(rank):
    """Small and large ones; large tensors are sent from where they are."""
    generator = torch.Generator().manual_seed(rank)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    large = (draw(2**19), None, draw(1000, 700).T, draw(3, 0), draw(7).bfloat16())
    return [(draw(5), draw(3)), large, (draw(2, 2),), (draw(2**19 + 1),), large[2:], ()]


def exchange_messages(rank, port):
    become_rank(rank, port)
    with job.join(torch.device("cpu"), timeout=LIMIT) as transport:
        transport.connect([(0, 1), (1, 0)])
        other = 1 - rank
        for turn in range(2):
            for number, (own, others) in enumerate(zip(messages(rank), messages(other), strict=True)):
                action = Action(0, Kind.FORWARD, number)
                transport.begin_tick()
                pending = transport.receive(other, action, layout_of(others))
                if turn == 0:
                    transport.send(other, action, own)
                else:
                    transport.send_packed(other, action, layout_of(own).pack(own))
                for found, expected in zip(pending(), others, strict=True):
                    assert found is expected is None or found.equal(expected)
        small = torch.zeros(5)
        transport.send(other, Action(0, Kind.FORWARD, 98), (small,))
        copied = weakref.ref(small)
        del small
        transport.receive(other, Action(0, Kind.FORWARD, 98), layout_of((torch.zeros(5),)))()
        transport.gather(None)  # now it has arrived on both ranks
        assert copied() is None  # although nobody has waited until it has left
        large = torch.zeros(2**19)
        transport.send(other, Action(0, Kind.FORWARD, 99), (large,))
        large += 1
        transport.receive(other, Action(0, Kind.FORWARD, 99), layout_of((large,)))
        with pytest.raises(RuntimeError, match="a tensor was modified while it was being sent"):
            transport.flush()
        transport.flush()


def test_small_and_large_messages_arrive_in_order():
    meet(exchange_messages)


def launcher_with_a_stopped_rank(sender):
    """A launcher whose only process joins the job and is stopped."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)})
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if (rank := os.fork()) == 0:
        job.connect_store(timedelta(seconds=LIMIT))
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(rank, os.WUNTRACED)
    sender.send(rank)
    time.sleep(LIMIT)


def test_a_stopped_rank_continues_when_the_launcher_is_killed():
    receiver, sender = fork_server.context().Pipe(duplex=False)
    launcher = fork_server.start(launcher_with_a_stopped_rank, sender)
    assert receiver.poll(LIMIT)
    rank = receiver.recv()
    assert state(rank) == "T"
    launcher.kill()
    launcher.join()
    deadline = time.monotonic() + 30
    while (found := state(rank)) not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.02)
    if found not in ("", "Z"):
        os.kill(rank, signal.SIGKILL)
    assert found in ("", "Z")


def state(pid):
    """The state of a process; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return ""


class TestLauncher:
    """Stopping while processes are still being started; every one of them is stopped."""

    def launch(self, start, processes):
        return launch._launch(launch.Launcher(start, processes, 1, None))

    @pytest.mark.parametrize("number", [0, 1])
    def test_asked_to_stop_while_one_is_being_started(self, number, capfd):
        started = []

        def start(variables):
            started.append(subprocess.Popen(["sleep", "100"], start_new_session=True))
            if len(started) == number + 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return started[-1]

        assert self.launch(start, 2) == 130
        assert [process.returncode for process in started] == [-signal.SIGTERM] * (number + 1)
        assert (
            capfd.readouterr().err == "petra: stopped; --resume continues from the last checkpoint, if there is one\n"
        )

    def test_the_worst_exit_code_counts(self, capfd):
        codes = iter([1, 2, 0])
        assert self.launch(lambda variables: subprocess.Popen(["sh", "-c", f"exit {next(codes)}"]), 3) == 2
        assert capfd.readouterr().err == ""

    def test_the_others_have_time_to_say_why(self):
        assert watchdog.DIAGNOSIS_TIMEOUT + 2 * watchdog.SILENCE_LIMIT <= launch.PATIENCE


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    process = fork_server.start(main, [*SMALL, "--out", str(folder)])
    process.join(LIMIT)
    assert process.exitcode == 0
    return result(folder)


def test_ranks_end_with_the_weights_of_one_process(alone, tmp_path):
    run("--ranks", 2, "--trace", 20, "--out", tmp_path / "two", program=("-m", "petra"))
    assert result(tmp_path / "two") == alone
    events = json.loads((tmp_path / "two" / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["ranks"] == 2
    assert len(summary["memory_bytes"]) == 4


@pytest.mark.timeout(500)
def test_killed_five_times_at_random_it_ends_with_the_same_weights(alone, tmp_path):
    """SIGKILL for a random rank at a random tick: the job is over in seconds, says who is gone, and goes on exactly."""
    chance = random.Random(7)
    folder = tmp_path / "run"
    for number in range(5):
        killed, tick = chance.randrange(2), 2 + 8 * number + chance.randrange(9)
        logs = [tmp_path / f"{number}.{rank}" for rank in range(2)]
        ranks, _store = start_ranks(logs, "--resume", "--out", folder, fault=f"kill:{killed}:{tick}")
        ranks[killed].join(LIMIT)
        died = time.monotonic()
        ranks[1 - killed].join(LIMIT)
        took = time.monotonic() - died
        for process in ranks:
            process.kill()
        assert took < 10
        assert [ranks[killed].exitcode, ranks[1 - killed].exitcode] == [-signal.SIGKILL, 1]
        assert logs[killed].read_text() == ""
        (line,) = logs[1 - killed].read_text().splitlines()
        assert f"rank {killed} is gone or stuck: last heard from in tick" in line
        assert f"; rank {1 - killed} is in tick" in line
    go_on(folder)
    assert result(folder) == alone


def test_a_killed_rank_ends_the_whole_job(tmp_path):
    code, error = end_launcher(
        *start_launcher("--ranks", 2, "--snapshot-every", 0, "--out", tmp_path / "run", fault="kill:1:9")
    )
    assert code == 1
    first, second = error.strip().splitlines()
    assert "rank 1 is gone or stuck: last heard from in tick" in first
    assert second == "petra: process 1 was ended by SIGKILL"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            "hang:1:9",
            r"rank 1 is stuck in tick \d+, (forward|backward|update) of micro-batch \d+ on stage [23], for \d+ s",
        ),
        (
            "stop:0:10",
            r"rank 0 is gone or stuck: last heard from in tick \d+, .*; rank 1 is in tick \d+, .*, waiting for rank 0",
        ),
        ("corrupt:0:9", r"the message of stage 1, micro-batch \d+, forward was corrupted in transit"),
        ("full-disk:1:9", r"rank 1: the checkpoint could not be written \(No space left on device\); the one before"),
    ],
)
def test_what_goes_wrong_is_said_once_and_nothing_is_lost(fault, says, alone, tmp_path):
    patience = ("--timeout", 5) if fault.startswith(("hang", "stop")) else ()
    if fault.startswith("stop"):  # somebody has to end it, and need not wait for as long as it usually does
        job = start_launcher(
            "--ranks", 2, "--snapshot-every", 0, *patience, "--out", tmp_path / "run", fault=fault, patience=2.0
        )
        code, error = end_launcher(*job)
    else:
        (code, _), error = together(tmp_path / "run", *patience, fault=fault)
    assert code in (1, 2)
    assert re.search(says, error), error
    assert len([line for line in error.splitlines() if "error" in line]) == 1, error
    go_on(tmp_path / "run")
    assert result(tmp_path / "run") == alone


def test_torchrun_starts_a_killed_job_anew_and_it_goes_on_exactly(alone, tmp_path):
    options = ("--placement", "0,1,0,1", "--overwrite")
    code, error = end_launcher(*start_torchrun(*options, "--out", tmp_path / "run", fault="kill:1:17"))
    assert code == 0, error
    assert "rank 1 is gone or stuck" in error
    assert result(tmp_path / "run") == alone


class TestRestarts:
    """What a process does that torchrun has started a second time; one process is enough to see it."""

    @pytest.fixture(autouse=True)
    def restarted(self, monkeypatch, tmp_path):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "this job")
        monkeypatch.chdir(tmp_path)

    def train(self, *arguments):
        return main([*SMALL, "--epochs", "1", *arguments])

    def test_a_run_of_this_job_goes_on_whatever_was_asked_for(self, tmp_path, monkeypatch, capsys):
        folder = tmp_path / "runs" / "revnet18-petra"
        assert self.train() == 0  # without --out
        before = (folder / "summary.json").stat().st_mtime_ns
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        for given in ([], ["--overwrite"], ["--out", str(folder)]):
            assert self.train(*given) == 0
            assert (folder / "summary.json").stat().st_mtime_ns == before  # it was finished, and not run again

    def test_a_run_of_another_job_is_refused_again(self, tmp_path, monkeypatch, capsys):
        assert self.train() == 0
        assert self.train() == 2  # the same job, but not started again
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another job")
        assert self.train() == 2
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert self.train() == 2
        assert "holds a run already" in capsys.readouterr().err


def test_replicas_resume_exactly(tmp_path):
    options = ("--replicas", 2, "--accumulate", 2, "--checkpoint-every", 3)
    assert together(tmp_path / "straight", *options) == ([0, 0], "")
    codes, error = together(tmp_path / "run", *options, fault="kill:0:11")  # rank 0 of both replicas
    assert codes == [-signal.SIGKILL] * 2, error
    go_on(tmp_path / "run", *options)
    first, second = (result(tmp_path / name) for name in ("run", "straight"))
    assert first[:2] == second[:2]


def test_a_job_that_is_asked_to_stop_writes_one_checkpoint_and_goes_on(alone, tmp_path):
    folder = tmp_path / "run"
    process, hears = start_launcher("--ranks", 2, "--out", folder)
    deadline = time.monotonic() + LIMIT
    while not (folder / "checkpoint" / "latest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    code, error = end_launcher(process, hears)
    assert code == 130
    assert re.fullmatch(r"petra: stopped in epoch \d; continue with --resume --out \S+", error.strip()), error
    go_on(folder)
    assert result(folder) == alone


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", 9], "--ranks is 9 for 4 stages: give at most 4"),
        (["--ranks", 0], "--ranks is 0: give 1 or more"),
        (["--ranks", 2, "--replicas", 0], "--replicas is 0: give 1 or more"),
        (["--ranks", 2, "--timeout", 0], "--timeout is 0.0: give more than 0"),
        (
            ["--ranks", 2, "--replicas", 2, "--batch-size", 1],
            "--replicas is 2, but they share micro-batches of 1 samples",
        ),
    ],
)
def test_bad_input_starts_nobody(arguments, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("petra.cli.train.launch_ranks", lambda *given, **options: pytest.fail("ranks were started"))
    assert main([*SMALL, *map(str, arguments), "--out", str(tmp_path / "run")]) == 2
    check_said_once(capsys.readouterr().err, says, tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--placement", "0,1"], "give the rank of each of the 4 stages"),
        (["--data", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_that_ranks_find_is_said_once(arguments, says, tmp_path):
    codes, error = together(tmp_path / "run", *arguments)
    assert codes == [2, 2]
    check_said_once(error, says, tmp_path / "run")


@pytest.mark.parametrize(("name", "waits"), [("this job", True), (None, False)])
def test_under_torchrun_the_first_process_has_time_to_say_what_all_find(name, waits, monkeypatch, capsys):
    """And where it has found nothing, the other says it."""
    waited = []
    monkeypatch.setattr("petra.cli.main.time", SimpleNamespace(sleep=waited.append), raising=False)
    monkeypatch.setattr("petra.cli.main._leave", lambda code: code)
    for variable, value in {"WORLD_SIZE": "2", "RANK": "1", "TORCHELASTIC_RUN_ID": name}.items():
        monkeypatch.setenv(variable, value) if value else monkeypatch.delenv(variable, raising=False)
    assert main([*SMALL, "--ranks", "3"]) == 2
    assert bool(waited) == waits
    assert ("--ranks is 3, but 2 were started" in capsys.readouterr().err) == waits


def check_said_once(error, says, folder):
    assert says in error
    assert len(error.strip().splitlines()) == 1, error
    assert not folder.exists()
