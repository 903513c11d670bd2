"""Checkpoints that are written while training goes on."""

import copy
import errno
import json
import os
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from helpers.faults import before_writing
from helpers.networks import batches, mixed_network
from helpers.trainers import make, same_weights

import petra
from petra.distributed import SingleProcess, run_together
from petra.pipeline import Diverged
from petra.trainer import checkpoint
from petra.trainer.best_weights import BEST, forget_newer
from petra.trainer.checkpoint_folder import Checkpoints
from petra.trainer.progress import RunProgress

pytestmark = pytest.mark.slow

DATA = list(batches(20))
NETWORK = mixed_network()
LIMIT = 60


def fit(folder, transport=None, resume=False, **options):
    trainer = make(copy.deepcopy(NETWORK), stages=4, transport=transport or SingleProcess())
    trainer.fit(DATA, epochs=1, checkpoint_every=6, out=folder, resume=resume, quiet=True, **options)
    return trainer.network


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("uninterrupted"))


def names(folder):
    return sorted(path.name for path in (folder / "checkpoint").iterdir() if path.is_dir())


class Copies(petra.Callback):
    """Copies the folder when the first checkpoint is complete, and while the second is being written."""

    def __init__(self, folder, copies, gates):
        self.folder, self.copies, self.gates, self.complete = folder, copies, gates, []

    def on_update(self, loop):
        if not loop.is_main:
            return
        if loop.step == 9:
            assert not (self.folder / "checkpoint" / "latest.json").exists()
            self.gates["000001"].set()
        if loop.step == 17:
            shutil.copytree(self.folder, self.copies / "killed")
            self.gates["000002"].set()

    def on_checkpoint(self, loop):
        self.complete.append(loop.step)
        if loop.is_main and len(self.complete) == 1:
            shutil.copytree(self.folder, self.copies / "first")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_slow_disk_holds_the_state_of_the_tick_of_the_copy(tmp_path, monkeypatch, uninterrupted, ranks):
    """The first checkpoint, of tick 6, is written after tick 9; training ends as if none had been written."""
    gates = {"000001": threading.Event(), "000002": threading.Event()}

    def hold(path):
        if path.name == "stage1.pt" and path.parent.name in gates:
            assert gates[path.parent.name].wait(LIMIT)

    monkeypatch.setattr(checkpoint, "write_atomically", before_writing(hold))

    def work(transport):
        copies = Copies(tmp_path / "run", tmp_path, gates)
        return fit(tmp_path / "run", transport, callbacks=[copies]), copies.complete

    networks, complete = zip(*run_together(work, ranks), strict=True)
    assert len(complete[0]) == 5  # of ticks 6, 12, 18, and two of the end
    assert 9 < complete[0][0] <= 12  # the second one has waited for it
    assert len({tuple(steps) for steps in complete}) == 1  # all ranks noticed in the same tick
    for name in ("first", "killed"):
        saved = Checkpoints(tmp_path / name / "checkpoint", SingleProcess()).run()
        assert saved["progress"]["microbatches"] == 6
        resumed = run_together(lambda t, name=name: fit(tmp_path / name, t, resume=True), ranks)
        for network in (*networks, *resumed):
            own = {key: value for key, value in network.state_dict().items() if not value.is_meta}
            assert all(torch.equal(value, uninterrupted.state_dict()[key]) for key, value in own.items())


def test_a_rank_that_cannot_write_ends_all_and_the_checkpoint_before_is_kept(tmp_path, monkeypatch, uninterrupted):
    def full(path):
        if path.parent.name == "000002" and path.name == "stage0.pt":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def work(transport):
        with pytest.raises(OSError, match=r"^rank 0: .* could not be written \(No space .*; the one before it is kept"):
            fit(tmp_path, transport)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_atomically", before_writing(full))
        run_together(work, 2)
    assert Checkpoints(tmp_path / "checkpoint", SingleProcess()).run()["progress"]["microbatches"] == 6
    assert same_weights(fit(tmp_path, resume=True), uninterrupted)


def test_a_weight_that_is_not_finite_is_an_error_of_all_ranks(tmp_path):
    def work(transport):
        rank = transport.position.rank
        checkpoints = Checkpoints(tmp_path, transport)
        weights = {"network": {"w": torch.tensor([1.0, torch.nan if rank == 0 else 0.0])}}
        with pytest.raises(Diverged, match=r"^w is not finite after micro-batch -1"):
            checkpoints.save({}, {rank: {"weights": weights, "flight": {}}})
        return checkpoints.exist()

    assert run_together(work, 2) == [False, False]


def test_an_error_in_training_completes_the_checkpoint_of_a_single_process(tmp_path, monkeypatch):
    entered = threading.Event()

    class Die(petra.Callback):
        def on_update(self, loop):
            if loop.step == 8:
                entered.set()
                raise RuntimeError("died")

    monkeypatch.setattr(checkpoint, "write_atomically", before_writing(lambda path: entered.wait(LIMIT)))
    with pytest.raises(RuntimeError, match="died"):
        fit(tmp_path, callbacks=[Die()])
    assert Checkpoints(tmp_path / "checkpoint", SingleProcess()).run()["progress"]["microbatches"] == 6


def test_older_checkpoints_are_kept_and_continued_from(tmp_path, uninterrupted, capsys):
    assert same_weights(fit(tmp_path / "run", keep=4), uninterrupted)
    assert names(tmp_path / "run") == ["000002", "000003", "000004", "000005"]
    with pytest.raises(ValueError, match=r"checkpoint 1 is not in .*: it has 2, 3, 4, 5"):
        fit(tmp_path / "run", resume=True, keep=4, from_checkpoint=1)
    with pytest.raises(ValueError, match="from_checkpoint is 2, but resume is False: give resume=True"):
        fit(tmp_path / "run", from_checkpoint=2)

    class Die(petra.Callback):
        def on_start(self, loop):
            assert loop.progress.microbatches == 12
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", resume=True, keep=4, from_checkpoint=2, callbacks=[Die()])
    with pytest.raises(KeyboardInterrupt):  # newer ones do not count any more
        fit(tmp_path / "run", resume=True, keep=4, callbacks=[Die()])
    with pytest.raises(ValueError, match="checkpoint 5 is not in"):
        fit(tmp_path / "run", resume=True, keep=4, from_checkpoint=5)
    assert same_weights(fit(tmp_path / "run", resume=True, keep=2), uninterrupted)
    assert names(tmp_path / "run") == ["000004", "000005"]


def test_best_weights_of_a_future_that_is_given_up_are_removed(tmp_path):
    checkpoint.export_weights({"w": torch.ones(1)}, tmp_path / BEST, {"step": "9"})
    transport = SingleProcess()
    same = RunProgress(best=0.5, best_step=9)
    assert forget_newer(tmp_path, same, transport) is same
    found = forget_newer(tmp_path, RunProgress(best=0.4, best_step=3), transport)
    assert found.best is None
    assert not (tmp_path / BEST).exists()


def test_an_evaluation_during_the_write_does_not_replace_weights_that_the_checkpoint_knows(tmp_path):
    from petra.trainer.best_weights import BestWeights

    network = torch.nn.Linear(1, 1)
    trainer = SimpleNamespace(
        transport=SingleProcess(), ema=None, network=network, weights=lambda average: network.state_dict()
    )
    best = BestWeights(tmp_path, trainer)
    known = best.write(3)
    best.start_checkpoint()
    torch.nn.init.zeros_(network.weight)
    best.write(6)
    best.commit()
    progress = RunProgress(best=1.0, best_step=3, best_sha256=known)
    assert BestWeights(tmp_path, trainer).recover(progress) is None  # the training ends before the next checkpoint
    assert [path.name for path in tmp_path.iterdir()] == [BEST]
    assert forget_newer(tmp_path, progress, SingleProcess()) is progress


def test_from_checkpoint_needs_resume(tmp_path, capsys):
    from petra.cli.main import main

    given = ["--model", "revnet18", "--data", "digits", "--out", str(tmp_path / "run")]
    assert main(["train", *given, "--from-checkpoint", "3"]) == 2
    assert "--from-checkpoint is 3 without --resume: give --resume" in capsys.readouterr().err


def test_a_run_continues_from_an_older_checkpoint(tmp_path):
    """Metrics and summary are those of an unbroken run."""
    from helpers.small_runs import make as make_run

    run = make_run(tmp_path / "run", keep=3, checkpoint_every=7, batch_size=256, stages=2)
    whole = run()
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    oldest = int(names(tmp_path / "run")[0])
    again = make_run(
        tmp_path / "run", resume=True, from_checkpoint=oldest, keep=3, checkpoint_every=7, batch_size=256, stages=2
    )
    assert not (tmp_path / "run" / "summary.json").exists() or again.progress.finished
    assert again()["weights_sha256"] == whole["weights_sha256"]
    found = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["test_loss"] for line in found] == [json.loads(line)["test_loss"] for line in metrics]
