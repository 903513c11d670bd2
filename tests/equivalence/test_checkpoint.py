import copy
import os
import shutil

import pytest
import torch
from helpers.grids import all_pairs
from helpers.networks import batches, mixed_network
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from petra import METHODS, Network, ReversibleBlock, Trainer
from petra.distributed import SingleProcess
from petra.trainer import checkpoint
from petra.trainer.checkpoint_folder import Checkpoints, remove_all

pytestmark = pytest.mark.slow


def make(network, **options):
    return Trainer(
        network,
        loss=cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.97),
        **{"seed": 5, "stages": 1, **options},
    )


def weights(trainer):
    return list(trainer.network.state_dict().values())


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("k", [1, 3])
def test_a_run_continued_from_any_tick_ends_with_the_same_bits(tmp_path, method, k):
    options = {"method": method, "stages": 4, "accumulate": k}
    network = mixed_network()
    data = list(batches(11))
    straight = make(copy.deepcopy(network), **options)
    for x, y in data:
        straight.step(x, y)
    straight.drain()
    going = make(network, **options)
    for cut, (x, y) in enumerate(data[:10], 1):
        going.step(x, y)
        if cut % 4 != 1:  # after 1, 5 and 9 micro-batches, at each place in an update of three
            continue
        checkpoint.save(tmp_path / "c.pt", {"trainer": going.state_dict()})
        resumed = make(mixed_network(), **options)  # other weights, to be replaced
        resumed.load_state_dict(checkpoint.load(tmp_path / "c.pt")["trainer"])
        for x, y in data[cut:]:
            resumed.step(x, y)
        resumed.drain()
        assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(straight), strict=True))


def test_a_state_in_memory_does_not_move_on_with_the_trainer():
    trainer = make(mixed_network(), stages=4)
    data = list(batches(9))
    for x, y in data[:5]:
        trainer.step(x, y)
    state = trainer.state_dict()
    flights = [stage["flight"] for stage in state["stages"].values()]
    before = [[sorted(flight[what]) for what in ("forward", "backward", "saved", "targets")] for flight in flights]
    for x, y in data[5:]:
        trainer.step(x, y)
    assert [
        [sorted(flight[what]) for what in ("forward", "backward", "saved", "targets")] for flight in flights
    ] == before


def test_weights_that_layers_share_can_be_exported(tmp_path):
    f = nn.Linear(4, 4)
    network = Network(ReversibleBlock(f, f))
    checkpoint.export_weights(network.state_dict(), tmp_path / "w.safetensors")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["0.g.weight"], f.weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "checkpointed"}, "method petra, not checkpointed"),
        ({"stages": 3}, r"stages \[2, 2, 1, 1\], not \[2, 2, 2\]"),
        ({"accumulate": 2}, "accumulate 1, not 2"),
        ({"schedule": "lock-step"}, "schedule low-staleness, not lock-step"),
        ({"seed": 1}, "seed 5, not 1"),
        ({"comm_dtype": "int8"}, "comm_dtype float32, not int8"),
    ],
)
def test_another_layout_is_refused(options, message):
    state = make(mixed_network(), stages=4).state_dict()
    with pytest.raises(ValueError, match=message):
        make(mixed_network(), **{"stages": 4, **options}).load_state_dict(state)


def test_other_numbers_in_flight_are_refused():
    one, other = (make(mixed_network(), stages=4, schedule=schedule) for schedule in ([5, 3, 1, 0], [5, 2, 1, 0]))
    with pytest.raises(ValueError, match=r"in_flight \[5, 3, 1, 0\], not \[5, 2, 1, 0\]"):
        other.load_state_dict(one.state_dict())


def test_a_crash_while_writing_leaves_the_last_one_whole(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"value": torch.ones(3)})

    def half(state, file):
        file.write(b"half of a")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(path, {"value": torch.zeros(3)})
    assert torch.equal(checkpoint.load(path)["value"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_nothing_is_left_of_one_that_was_killed_while_writing(tmp_path):
    """What is left would stand in the way of --overwrite."""
    folder = tmp_path / "checkpoint"
    for name in ("latest.json", "latest.json.tmp", "000001/run.pt", "000002/stage0.pt.tmp"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    remove_all(folder)
    assert not folder.exists()


def test_a_copy_beside_the_checkpoints_is_left_alone(tmp_path):
    """Whatever was called less than the next one lost its files."""
    checkpoints = Checkpoints(tmp_path, SingleProcess())
    checkpoints.save({}, {})
    kept = shutil.copytree(tmp_path / "000001", tmp_path / "000001-kept")
    checkpoints.save({}, {})
    remove_all(tmp_path)
    assert (kept / "run.pt").exists()
    assert list(tmp_path.iterdir()) == [kept]


def test_a_first_one_that_was_cut_off_does_not_count(tmp_path):
    checkpoint.save(tmp_path / "000001" / "stage0.pt", {})
    assert not Checkpoints(tmp_path, SingleProcess()).exist()
    checkpoint.save(tmp_path / "000002" / "stage0.pt", {})
    with pytest.raises(ValueError, match=r"latest\.json is missing, but .*000002 is"):
        Checkpoints(tmp_path, SingleProcess())


def test_what_another_rank_writes_of_the_next_one_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path, SingleProcess())
    checkpoints.save({}, {})
    checkpoint.save(tmp_path / "000003" / "stage1.pt", {})
    checkpoints.save({}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002", "000003", "latest.json"]
    assert (tmp_path / "000003" / "stage1.pt").exists()


def test_what_takes_over_is_on_disk_first(tmp_path, monkeypatch):
    """The file is synced before it is renamed, and the folder after."""
    calls = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (calls.append("sync"), fsync(number)))
    replace = type(tmp_path).replace
    monkeypatch.setattr(type(tmp_path), "replace", lambda self, to: (calls.append("replace"), replace(self, to)))
    checkpoint.save(tmp_path / "checkpoint.pt", {})
    assert calls == ["sync", "replace", "sync"]


@pytest.mark.parametrize("keep", [0, 10, 500, -1])
def test_truncated_files_are_named(tmp_path, keep):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"value": torch.ones(1000)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"checkpoint\.pt is not a complete checkpoint") as found:
        checkpoint.load(path)
    assert "\n" not in str(found.value)


def test_a_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "a.pt"
    checkpoint.save(path, {"weights": torch.arange(1000.0)})
    content = bytearray(path.read_bytes())
    content[content.index(torch.arange(500.0, 510.0).numpy().tobytes())] ^= 16
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"a\.pt is not a complete checkpoint .*is damaged"):
        checkpoint.load(path)


def test_code_in_a_checkpoint_is_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"format": checkpoint.FORMAT, "x": Evil()}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="is not a complete checkpoint"):
        checkpoint.load(tmp_path / "checkpoint.pt")
    assert not (tmp_path / "owned").exists()


def test_other_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        checkpoint.load(tmp_path / "none.pt")
    torch.save({"format": 99}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="not a checkpoint of this version"):
        checkpoint.load(tmp_path / "other.pt")


@pytest.mark.parametrize(
    ("kind", "stages", "fused"),
    all_pairs((torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam), (4, 2), (True, False)),
)
def test_how_an_optimizer_computes_stays_its_own_when_it_loads(kind, fused, stages):
    """A checkpoint of a GPU, where optimizers are fused, goes on where they are not, and the other way round."""

    def make(fused):
        ways = {} if kind is torch.optim.NAdam else {"fused": fused, "foreach": False}
        more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        return Trainer(
            mixed_network().double(),
            loss=cross_entropy,
            optimizer=lambda p: kind(p, 0.01, weight_decay=1e-3, **more, **ways),
            stages=stages,
            scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        )

    data = [(x.double(), y) for x, y in batches(10)]
    first, same, other = make(fused), make(fused), make(not fused)
    for x, y in data[:6]:
        first.step(x, y)
    if stages == 2:
        first.drain()
    state = copy.deepcopy(first.state_dict())
    for trainer in (same, other):
        trainer.load_drained(copy.deepcopy(state)) if stages == 2 else trainer.load_state_dict(copy.deepcopy(state))
        for x, y in data[6:]:
            trainer.step(x, y)
        trainer.drain()
    for trainer, own in ((same, fused), (other, not fused)):
        groups = [group for stage in trainer.stages for group in stage.optimizer.param_groups]
        if kind is not torch.optim.NAdam:
            assert all(group["fused"] is own for group in groups)
        assert groups[0]["lr"] < 0.01
    for a, b in zip(weights(same), weights(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
