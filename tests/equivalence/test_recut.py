"""Checkpoints of all ranks: whole or not at all, and read with other stages, ranks and replicas."""

import io
import json
import os
import shutil
import threading
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers.faults import FullDisk
from helpers.small_runs import DATA, OPEN, make
from torch import nn

from petra import Trainer
from petra.distributed import SingleProcess, run_together
from petra.pipeline import Diverged
from petra.schedule import Kind
from petra.trainer import checkpoint
from petra.trainer.checkpoint_folder import Checkpoints

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def final_tick():
    yield
    for run in OPEN:
        run.close()


def evaluated(run):
    return run.trainer.evaluate(run.test.epoch(0))


@pytest.fixture(scope="module")
def half_way(tmp_path_factory):
    """One of two epochs done with four stages, micro-batches in flight; and what it is like once they are through."""
    folder = tmp_path_factory.mktemp("half") / "run"
    run = make(folder)
    run._epoch(threading.Event())
    run._finish_save()
    assert run.trainer.executor.in_flight
    run.progress.count(run.trainer.drain())
    run.progress.read()
    return folder, evaluated(run), run


def resumed(half_way, tmp_path, transport=None, **changes):
    folder = tmp_path / "run"
    if not folder.exists():
        shutil.copytree(half_way[0], folder)
    return make(folder, transport, resume=True, **changes)


@pytest.mark.parametrize("stages", [1, 2, 3, [1, 2, 1]])
def test_four_stages_resume_at_another_cut(half_way, tmp_path, stages):
    run = resumed(half_way, tmp_path, stages=stages)
    assert evaluated(run) == half_way[1]
    old = half_way[2]
    assert (run.progress.loss, run.progress.samples) == (
        old.progress.loss,
        old.progress.samples,
    )  # none lost, none twice
    assert run.progress.samples > 0
    momenta = {n: s["momentum_buffer"] for n, s in named_state(old).items()}
    assert all(torch.equal(s["momentum_buffer"], momenta[n]) for n, s in named_state(run).items())
    assert learning_rates(run) == learning_rates(old)
    assert {stage.updates for stage in run.trainer.stages} == {stage.updates for stage in old.trainer.stages}
    assert run.trainer.stages[0].scheduler.last_epoch == old.trainer.stages[0].scheduler.last_epoch
    summary = run()
    assert summary["stages"] == [4] if stages == 1 else len(summary["stages"]) == len(run.trainer.layout["stages"])
    assert summary["test_accuracy"] > 0.2


def named_state(run):
    names = {p: name for name, p in run.trainer.network.named_parameters()}
    return {names[p]: state for stage in run.trainer.stages for p, state in stage.optimizer.state.items()}


def learning_rates(run):
    names = {p: name for name, p in run.trainer.network.named_parameters()}
    groups = [group for stage in run.trainer.stages for group in stage.optimizer.param_groups]
    return {names[p]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


def test_a_checkpoint_in_flight_goes_on_exactly_with_any_number_of_ranks(half_way, tmp_path):
    alone = resumed(half_way, tmp_path / "alone")()
    for ranks in (2, 4):
        folder = tmp_path / f"{ranks}"
        shutil.copytree(half_way[0], folder / "run")
        summaries = run_together(lambda t, folder=folder: resumed(half_way, folder, t)(), ranks)
        assert summaries[-1]["weights_sha256"] == alone["weights_sha256"]
        metrics = [(path / "run" / "metrics.jsonl").read_text().splitlines() for path in (folder, tmp_path / "alone")]
        assert len(metrics[0]) == len(metrics[1]) == 2
    # and back again, from ranks to one process
    back = make(tmp_path / "4" / "run", resume=True)
    assert back.progress.finished


@pytest.mark.parametrize("stages", [2, 3])
def test_a_run_that_is_through_can_be_asked_for_with_other_stages_and_ranks(tmp_path, stages):
    """Finished or nearly so: the weights of other ranks are in a checkpoint of the stages of before."""
    folder = tmp_path / "run"
    before = make(folder, epochs=1, batch_size=512)()
    last = folder / "checkpoint" / newest(folder)
    shutil.copytree(last, last.with_name("000001"))  # as if it had been killed before that was removed
    for finished in (True, False):
        if not finished:
            state = checkpoint.load(folder / "checkpoint" / newest(folder) / "run.pt")
            state["progress"]["finished"] = False
            checkpoint.save(folder / "checkpoint" / newest(folder) / "run.pt", state)
        again = run_together(
            lambda transport: make(folder, transport, resume=True, epochs=1, batch_size=512, stages=stages)(), 2
        )
        assert again[-1]["weights_sha256"] == before["weights_sha256"]
        assert sorted(os.listdir(folder / "checkpoint")) == [newest(folder), "latest.json"]


def newest(folder):
    return json.loads((folder / "checkpoint" / "latest.json").read_text())["name"]


def test_replicas_can_change(tmp_path):
    size = 63  # of which one replica has a sample more

    def half(transport):
        run = make(tmp_path / "run", transport, replicas=2, batch_size=size)
        run._epoch(threading.Event())
        assert run.trainer.executor.in_flight
        run.trainer.drain()
        found = evaluated(run)
        run.close()
        return found

    def half_again(transport):
        run = make(tmp_path / "run", transport, resume=True, replicas=2, batch_size=size)
        run.trainer.drain()
        found = evaluated(run)
        run.close()
        return found

    first = run_together(half, 2, 2)[0]
    for ranks in (1, 4):  # in flight, on other ranks
        assert run_together(half_again, ranks, 2)[0] == first
    run = make(tmp_path / "run", resume=True, replicas=1, batch_size=size)
    found = evaluated(run)
    assert found.accuracy == first.accuracy
    assert found.loss == pytest.approx(first.loss)
    assert run.progress.samples > 0
    run()


@pytest.mark.parametrize("change", [{"accumulate": 1}, {"seed": 1}, {"method": "delayed"}, {"comm_dtype": "bf16"}])
def test_what_cannot_change_is_refused(half_way, tmp_path, change):
    with pytest.raises(ValueError, match=f"the checkpoint was written with {next(iter(change))}"):
        resumed(half_way, tmp_path, **change)


class Crash(BaseException):
    """The process ends here."""


def write(checkpoints, value):
    stages = {i: {"weights": {"value": torch.tensor(value)}, "flight": {"m": value}} for i in range(3)}
    checkpoints.save({"value": value}, stages)


def read(folder):
    checkpoints = Checkpoints(folder, SingleProcess())
    stages = [checkpoints.stage(i) for i in range(3)]
    values = {checkpoints.run()["value"]}
    values |= {int(s["weights"]["value"]) for s in stages} | {s["flight"]["m"] for s in stages}
    (value,) = values  # all parts are of the same checkpoint
    return value


def test_a_crash_at_any_step_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """Every call that changes the disk is in turn the one at which the process ends."""
    steps = {Path: ("open", "replace", "unlink", "rmdir", "mkdir")}
    ends = []
    for crash_at in range(100):
        folder = tmp_path / str(crash_at)
        write(Checkpoints(folder, SingleProcess()), 1)
        left = [crash_at]
        with monkeypatch.context() as patch:
            for owner, names in steps.items():
                for name in names:
                    patch.setattr(owner, name, crashing(getattr(owner, name), left))
            try:
                write(Checkpoints(folder, SingleProcess()), 2)
                done = True
            except Crash:
                done = False
        ends.append(read(folder))
        write(Checkpoints(folder, SingleProcess()), 3)  # and the next one works over what was left behind
        assert read(folder) == 3
        assert len(list(folder.iterdir())) == 2
        if done:
            break
    assert done
    assert ends[0] == 1
    assert ends[-1] == 2
    assert ends == sorted(ends)
    assert 10 < crash_at < 99


def crashing(original, left):
    def step(*arguments, **options):
        left[0] -= 1
        if left[0] < 0:
            raise Crash
        return original(*arguments, **options)

    return step


def test_a_rank_that_cannot_write_is_named_and_the_last_checkpoint_stays(tmp_path, monkeypatch):
    def work(transport):
        checkpoints = Checkpoints(tmp_path, transport)
        rank = transport.position.rank
        checkpoints.save({"value": 1}, {rank: {"weights": {}, "flight": {}}})
        if rank == 1:
            raise_once = iter([True])
            original = checkpoint.save

            def full(path, state):
                if path.name == "stage1.pt" and next(raise_once, False):
                    raise OSError(28, "No space left on device")
                original(path, state)

            monkeypatch.setattr(checkpoint, "save", full)
        with pytest.raises(OSError, match=r"rank 1: the checkpoint could not be written \(No space left on device\)"):
            checkpoints.save({"value": 2}, {rank: {"weights": {}, "flight": {}}})
        before = Checkpoints(tmp_path, transport).run()["value"]
        transport.gather(None)
        checkpoints.save({"value": 3}, {rank: {"weights": {}, "flight": {}}})
        return before, Checkpoints(tmp_path, transport).run()["value"]

    found = run_together(work, 2)
    assert [before for before, _ in found] == [1, 1]
    assert found[1][1] == 3


def test_ranks_that_do_not_share_their_folder_are_told(tmp_path):
    def work(transport):
        folder = tmp_path / str(transport.position.rank)
        Checkpoints(folder, transport).save({}, {transport.position.rank: {"weights": {}, "flight": {}}})

    with pytest.raises(OSError, match=r"rank 0: the checkpoint could not be written .* on a shared disk"):
        run_together(work, 2)


def test_ranks_that_see_different_checkpoints_are_told(tmp_path):
    write(Checkpoints(tmp_path / "1", SingleProcess()), 1)

    def work(transport):
        return Checkpoints(tmp_path / str(transport.position.rank), transport).exist()

    with pytest.raises(ValueError, match="rank 1 has a last checkpoint 1, rank 0 has None"):
        run_together(work, 2)


def test_a_checkpoint_that_makes_room_for_a_newer_one_while_it_is_read(tmp_path):
    writing = Checkpoints(tmp_path / "checkpoint", SingleProcess())
    write(writing, 1)
    reading = Checkpoints(tmp_path / "checkpoint", SingleProcess())
    write(writing, 2)
    for read in (reading.run, lambda: reading.stage(0)):
        with pytest.raises(ValueError, match=f"another process is training in {tmp_path}: wait"):
            read()


def test_a_really_full_disk_is_named(tmp_path):
    """Wherever in the file it happens, and whatever torch makes of it."""
    for room in (0, 100, 1000, 3000):
        with pytest.raises(OSError, match="No space left on device"):
            checkpoint.write_state(FullDisk(io.BytesIO(), room), {"value": torch.ones(1000)})


def test_memory_is_measured_again_for_other_stages(half_way, tmp_path):
    run = resumed(half_way, tmp_path, stages=2)
    assert run.progress.memory == []
    run._save()  # stopped before the pipeline was full
    run.close()
    assert len(resumed(half_way, tmp_path, stages=2)()["memory_bytes"]) == 2


def test_memory_is_measured_again_on_other_ranks(tmp_path):
    """The peak of two processes is not that of one."""

    def half(transport):
        run = make(tmp_path / "run", transport)
        run._epoch(threading.Event())
        run.close()
        return run.progress.activation_peak

    peaks = run_together(half, 2)
    run, alone = make(tmp_path / "run", resume=True), make(tmp_path / "alone")
    assert run.progress.memory == []
    found, expected = run(), alone()
    assert found["activation_peak_bytes"] == expected["activation_peak_bytes"] > max(peaks) > 0
    assert found["memory_bytes"] == expected["memory_bytes"]


@pytest.mark.parametrize(
    ("method", "schedule"), [("petra", None), ("backprop", "gpipe"), ("petra", "flush:2"), ("reversible", "1f1b")]
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_memory_is_measured_with_a_full_pipeline_and_an_update(tmp_path, method, schedule, accumulate):
    """A group of gpipe is done in one tick, and in the others nothing is there to be measured."""
    run = make(tmp_path / "run", method=method, schedule=schedule, accumulate=accumulate)
    tick = run._probed_tick()
    actions = [action for phase in run.trainer.schedule.tick(tick, tick + 1) for action in phase]
    assert {action.stage for action in actions if action.kind is Kind.BACKWARD} == {0, 1, 2, 3}
    assert Kind.UPDATE in {action.kind for action in actions}


@pytest.mark.parametrize("other", [{"schedule": "1f1b", "flush_until": None}, {"flush_until": 50}, {"stages": 2}])
def test_the_warm_up_may_be_another_after_resuming(tmp_path, other):
    """What is in flight is finished as the checkpoint says, then the new options apply."""
    first = {"method": "petra", "accumulate": 2, "flush_until": 3}
    run = make(tmp_path / "run", **first)
    for x, y in islice(run.train.epoch(0), 9):
        run.progress.count(run.trainer.step(x, y))
        run.progress.batch += 1
    run._save()
    run.close()
    resumed = make(tmp_path / "run", resume=True, **{**first, **other})
    assert resumed.trainer.stages[0].updates == 5  # the last one with a single micro-batch
    assert resumed.trainer.layout["flush_until"] == {**first, **other}["flush_until"]
    assert resumed()["test_loss"] > 0


def test_replicas_go_on_with_the_figures_of_an_epoch_once(tmp_path):
    def work(transport):
        run = make(tmp_path / "run", transport, replicas=2)
        for x, y in islice(run.train.epoch(0), 6):
            run.progress.count(run.trainer.step(x, y))
        run._save()
        run.close()
        return run._sums(), make(tmp_path / "run", transport, resume=True, replicas=2)._sums()

    for before, after in run_together(work, 1, 2):
        assert before == after
        assert before[2] > 0


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    run = make(tmp_path / "run")
    run.trainer.network[1].f[0].weight.data[0] = torch.inf
    with pytest.raises(Diverged, match=r"conv1\.weight is not finite after micro-batch .*: lower the learning rate"):
        run._save()
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_a_stand_in_is_not_counted(tmp_path):
    """A last batch of one sample for two replicas: the run is as long as for one, and counts what is there."""
    size = len(DATA.train_labels) - 1

    def work(transport):
        run = make(tmp_path / "run", transport, replicas=2, batch_size=size, epochs=1, accumulate=1)
        summary = run()
        return summary, run.progress

    (summary, _), _ = run_together(work, 1, 2)
    assert summary["test_accuracy"] >= 0
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert record["step"] == 2
    assert (record["train_accuracy"] * len(DATA.train_labels)) == pytest.approx(
        round(record["train_accuracy"] * len(DATA.train_labels))
    )


def test_schedulers_are_put_together_for_other_groups():
    """Stages with one group and with two: what belongs to a group follows its parameters."""

    def make_trainer(stages):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3, bias=False)]

        def optimizer(parameters):
            groups = [([p for p in parameters if p.ndim == n], lr) for n, lr in ((2, 0.1), (1, 0.3))]
            return torch.optim.SGD([{"params": found, "lr": lr} for found, lr in groups if found], momentum=0.9)

        return Trainer(
            nn.Sequential(*layers),
            loss=nn.functional.cross_entropy,
            optimizer=optimizer,
            method="checkpointed",
            stages=stages,
            scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        )

    old = make_trainer(4)
    for _ in range(5):
        old.step(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    old.drain()
    for stages in (1, 2, [1, 3]):
        new = make_trainer(stages)
        new.load_drained(old.state_dict())
        for stage in new.stages:
            rates = [0.1, 0.3] if len(stage.optimizer.param_groups) == 2 else [0.1]
            assert stage.scheduler.base_lrs == rates
            assert stage.scheduler.get_last_lr() == pytest.approx([rate / 2**5 for rate in rates])
            assert [g["lr"] for g in stage.optimizer.param_groups] == stage.scheduler.get_last_lr()
            stage.optimizer.step()
            stage.scheduler.step()
            assert stage.scheduler.get_last_lr() == pytest.approx([rate / 2**6 for rate in rates])


def test_the_time_of_checkpoints_is_not_that_of_training(tmp_path, monkeypatch):
    run, now = make(tmp_path / "run", checkpoint_every=1), [0.0]

    def takes(seconds, found):
        now[0] += seconds
        return found

    monkeypatch.setattr("petra.trainer.progress.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(run, "_tick", lambda x, y, weight: takes(1.0, []))
    monkeypatch.setattr(run, "_save", lambda wait: takes(100.0, None))
    run._epoch(threading.Event())
    assert run.progress.seconds == len(run.train) < now[0] / 50
