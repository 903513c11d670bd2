"""Corrections on ranks and replicas, in checkpoints, in runs and on the command line."""

import copy
import io
import json
import re
import threading
from math import prod
from pathlib import Path

import pytest
import torch
from helpers.commands import SMALL
from helpers.networks import batches, mixed_network
from helpers.rank_worker import TICKS, fingerprint, run
from helpers.ranks import run_ranks
from helpers.replicas import train_replicas
from helpers.small_runs import make as make_run
from helpers.trainers import make, same_weights
from torch import nn

from petra.cli.main import main
from petra.corrections import CORRECTIONS
from petra.distributed import run_together
from petra.measure import MemoryProbe, at_rest
from petra.trainer import optimizers

pytestmark = pytest.mark.slow

SETS = [
    ("petra", ["predict"]),
    ("petra", ["predict", "spike", "shrink:0.8", "reschedule:6"]),
    ("petra", ["discrepancy", "spike"]),
    ("checkpointed", ["discrepancy", "reschedule:6"]),
    ("delayed", ["predict"]),
    ("petra-stashed", ["inertia:4", "predict", "spike"]),
]


def pipeline(transport=None, stages=4, **options):
    torch.manual_seed(0)
    return make(mixed_network(), seed=3, stages=stages, transport=transport, **options)


def deltas(trainer):
    names = {p: name for name, p in trainer.network.named_parameters()}
    found = [stage.corrections.context.state for stage in trainer.stages if stage.corrections is not None]
    return {names[p]: state["delta"] for states in found for p, state in states.items()}


@pytest.mark.parametrize(("method", "names"), SETS)
def test_ranks_equal_one_process_bit_for_bit(method, names):
    def work(transport=None, **more):
        trainer = pipeline(transport, method=method, corrections=names, schedule="lock-step", accumulate=2, **more)
        seen = []
        for x, y in batches(13):
            trainer.step(x, y)
            seen.append({stage.index: fingerprint(stage) for stage in trainer.stages})
        trainer.drain()
        seen.append({stage.index: fingerprint(stage) for stage in trainer.stages})
        return seen, deltas(trainer)

    seen, delta = work()
    ranks = run_together(lambda transport: work(transport, placement=[0, 1, 0, 1]), 2)
    for tick, expected in enumerate(seen):
        assert {**ranks[0][0][tick], **ranks[1][0][tick]} == expected, tick
    found = {**ranks[0][1], **ranks[1][1]}
    assert found.keys() == delta.keys()
    assert all(torch.equal(found[name], delta[name]) for name in delta)


def test_two_processes_equal_one_bit_for_bit(tmp_path):
    options = {"stages": 4, "schedule": "lock-step"}
    cases = [
        {"options": {**options, "method": method, "corrections": names}}
        for method, names in (SETS[1], SETS[2], SETS[4])
    ]
    expected = [json.loads(json.dumps(run(case))) for case in cases]
    plain = run({"options": {**options, "method": "petra"}})
    assert expected[0]["ticks"][-1] != json.loads(json.dumps(plain))["ticks"][-1]
    ranks = run_ranks(2, [{**case, "resume_after": 9 + i} for i, case in enumerate(cases)], tmp_path)
    for number, one in enumerate(expected):
        for tick in range(TICKS + 1):
            assert {**ranks[0][number]["ticks"][tick], **ranks[1][number]["ticks"][tick]} == one["ticks"][tick]
        assert ranks[0][number]["evaluation"] == one["evaluation"]


@pytest.mark.parametrize("names", [["predict", "spike", "shrink:0.9"], ["discrepancy"]])
def test_replicas_equal_one_with_all_samples(names):
    options = {"stages": 3, "accumulate": 2, "corrections": names}
    expected = train_replicas(**options)
    for found in run_together(lambda transport: train_replicas(transport, **options), 1, 2):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("method", "names", "k"), [(*one, (1, 3)[i % 2]) for i, one in enumerate(SETS)])
def test_a_run_continued_from_any_tick_ends_with_the_same_bits(method, names, k):
    options = {"method": method, "corrections": names, "accumulate": k, "schedule": "lock-step"}
    batch = list(batches(12))
    straight = pipeline(**options)
    for x, y in batch:
        straight.step(x, y)
    straight.drain()
    going = pipeline(**options)
    for cut, (x, y) in enumerate(batch, 1):
        going.step(x, y)
        if cut % 4 != 3:  # while the pipeline fills, just after, and later; at each place in an update of three
            continue
        buffer = io.BytesIO()
        torch.save(going.state_dict(), buffer)
        buffer.seek(0)
        resumed = make(mixed_network(), seed=3, stages=4, **options)  # other weights, to be replaced
        resumed.load_state_dict(torch.load(buffer, weights_only=True))
        for x, y in batch[cut:]:
            resumed.step(x, y)
        resumed.drain()
        state, expected = resumed.network.state_dict(), straight.network.state_dict()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert all(torch.equal(v, deltas(straight)[name]) for name, v in deltas(resumed).items())


def test_another_correction_raises():
    state = pipeline(corrections=["shrink:0.9"]).state_dict()
    with pytest.raises(ValueError, match=r"written with corrections \['shrink:0\.9'\], not \['shrink:0\.8'\]"):
        pipeline(corrections=["shrink:0.8"]).load_state_dict(state)
    with pytest.raises(ValueError, match="use the same corrections"):
        pipeline().load_state_dict(state)


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_differences_follow_their_parameters_to_another_cut(stages):
    old = pipeline(corrections=["discrepancy", "reschedule:9"])
    for x, y in batches(12):
        old.step(x, y)
    old.drain()
    new = pipeline(stages=stages, corrections=["discrepancy", "reschedule:9"])
    new.load_drained(old.state_dict())
    found, known = deltas(new), deltas(old)
    assert len(known) > 10
    assert (len(found) > 0) == (stages > 1)
    assert all(torch.equal(value, known[name]) for name, value in found.items())
    for stage in new.stages:
        assert stage.updates == 12
        if stage.corrections is not None:
            assert stage.corrections.context.updates == 12
            assert stage.corrections.context.lr_factor == 1
    for x, y in batches(12):
        new.step(x, y)
    new.drain()
    new.load_drained(old.state_dict())  # and once more, over what is there
    assert all(torch.equal(value, known[name]) for name, value in deltas(new).items())


def test_a_drained_stage_goes_on_counting_its_own_updates():
    """Those of Features Replay begin with updates with nothing, the first with most of them."""
    data = list(batches(12))
    trainers = []
    for _ in range(2):
        torch.manual_seed(0)
        trainers.append(make(mixed_network(), method="features-replay", stages=4, corrections=["reschedule:20"]))
    for x, y in data[:6]:
        trainers[0].step(x, y)
    trainers[0].drain()
    trainers[1].load_drained(trainers[0].state_dict())
    for trainer in trainers:
        for x, y in data[6:]:
            trainer.step(x, y)
        trainer.drain()
    assert same_weights(trainers[0].network, trainers[1].network)


def test_how_late_gradients_will_be_is_in_a_state_of_the_first_ticks():
    """Updates with nothing that are still to come count, too; with weight decay they move weights."""
    options = {
        "method": "features-replay",
        "corrections": ["predict"],
        "optimizer": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
    }
    first, *data = batches(5)
    straight, resumed = pipeline(**options), pipeline(**options)
    straight.step(*first)
    resumed.load_state_dict(straight.state_dict())
    for trainer in (straight, resumed):
        for x, y in data:
            trainer.step(x, y)
        trainer.drain()
    assert same_weights(straight.network, resumed.network)


def test_inertia_finds_the_momentum_of_the_moment_at_another_cut():
    def cycle(optimizer):
        return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.02, 10, base_momentum=0.5, max_momentum=0.6)

    old, new = (pipeline(stages=s, corrections=["inertia"], scheduler=cycle) for s in ([2, 2, 2], [2, 1, 3]))
    for x, y in batches(7):
        old.step(x, y)
    old.drain()
    new.load_drained(old.state_dict())
    before, after = (trainer.stages[0] for trainer in (old, new))
    assert before.corrections.context.lr_factor < 1
    assert after.corrections.context.lr_factor == before.corrections.context.lr_factor


@pytest.mark.parametrize("highest", [range(4), (1, 2)], ids=["from the first", "after a warm-up"])
def test_inertia_remembers_the_highest_learning_rate(highest):
    """In a checkpoint, and at another cut; a new trainer knows of no other than the first before it has loaded it."""

    def peaking(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 if t in highest else 0.1)

    def made(stages):
        return pipeline(stages=stages, corrections=["inertia:8"], scheduler=peaking)

    old, same, other = made([2, 2, 2]), made([2, 2, 2]), made([2, 1, 3])
    for x, y in batches(9):
        old.step(x, y)
    same.load_state_dict(copy.deepcopy(old.state_dict()))
    old.drain()
    other.load_drained(old.state_dict())
    for trainer in (old, same, other):
        context = trainer.stages[0].corrections.context
        assert (context.lr_ratio, context.momentum_horizon) == (0.125, 8 * 2**2 / 8)


def test_inertia_sees_a_learning_rate_that_someone_sets_before_draining():
    straight, resumed = (pipeline(corrections=["inertia:8"]) for _ in range(2))
    for x, y in batches(9):
        straight.step(x, y)
    for stage in straight.stages:
        stage.optimizer.param_groups[0]["lr"] *= 0.1
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for trainer in (straight, resumed):
        trainer.drain()
    assert same_weights(straight.network, resumed.network)


@pytest.mark.parametrize("k", [1, 3])
def test_inertia_sees_a_learning_rate_that_someone_sets_between_ticks(k):
    """At once, so that a checkpoint of just then goes on as the run does."""
    data = list(batches(24))
    straight, resumed = (pipeline(corrections=["predict", "inertia:8"], accumulate=k) for _ in range(2))
    for tick, (x, y) in enumerate(data):
        if tick == 16:
            for stage in straight.stages:
                stage.optimizer.param_groups[0]["lr"] *= 0.1
            resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
        straight.step(x, y)
        assert straight.stages[0].corrections.context.lr_ratio == (1 if tick < 16 else 0.125)
        if tick >= 16:
            resumed.step(x, y)
    assert same_weights(straight.network, resumed.network)


def test_inertia_looks_at_a_group_that_has_parameters():
    """Others are not in a checkpoint."""

    def grouped(parameters):
        groups = ([p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2])
        return torch.optim.SGD([{"params": group} for group in groups], lr=0.05, momentum=0.9)

    def dropping(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 if t < 4 else 0.1)

    options = {"corrections": ["inertia:8"], "optimizer": grouped, "scheduler": dropping}
    straight, resumed = pipeline(**options), pipeline(**options)
    for x, y in batches(9):
        straight.step(x, y)
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    assert [trainer.stages[0].corrections.context.lr_ratio for trainer in (straight, resumed)] == [0.125, 0.125]


def test_inertia_remembers_the_highest_learning_rate_of_the_same_layers_at_another_cut():
    def graded(parameters):
        return torch.optim.SGD(parameters, lr=0.005 if parameters[0].shape[1:2] == (2,) else 0.05, momentum=0.9)

    options = {"corrections": ["inertia:8"], "optimizer": graded}
    old, new = pipeline(stages=[1, 3, 2], **options), pipeline(stages=[1, 2, 3], **options)
    for x, y in batches(9):
        old.step(x, y)
    old.drain()
    new.load_drained(old.state_dict())
    assert [stage.corrections.context.peak_lr for stage in new.stages[:2]] == [0.005, 0.05]


@pytest.mark.parametrize("stages", [1, 2, [1, 3, 2]])
def test_stages_that_were_not_late_have_remembered_it_too(stages):
    def dropping(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.1)

    options = {"corrections": ["inertia:8"], "scheduler": dropping}
    old, new = pipeline(stages=stages, **options), pipeline(stages=6, **options)
    for x, y in batches(9):
        old.step(x, y)
    old.drain()
    new.load_drained(copy.deepcopy(old.state_dict()))
    assert [(s.corrections.context.peak_lr, s.corrections.context.lr_ratio) for s in new.stages[:-1]] == [
        (0.05, 2.0**-7)
    ] * 5


def test_groups_with_rates_of_their_own_remember_their_own():
    def network():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(4, 4) if i % 2 == 0 else nn.LayerNorm(4) for i in range(5)))

    def grouped(parameters):
        kinds = [[p for p in parameters if (p.ndim > 1) == matrix] for matrix in (True, False)]
        groups = [{"params": ps, "lr": lr} for ps, lr in zip(kinds, (0.02, 0.2), strict=True) if ps]
        return torch.optim.SGD(groups, momentum=0.5)

    def pipe(stages):
        def dropping(optimizer):
            return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.1)

        options = {"corrections": ["inertia:4"], "optimizer": grouped, "scheduler": dropping}
        return make(network(), method="checkpointed", stages=stages, **options)

    found = []
    for stages in ([2, 2, 1], 5):
        old, new = pipe(stages), pipe(5)
        for _ in range(12):
            old.step(torch.randn(3, 4), torch.randint(4, (3,)))
        old.drain()
        new.load_drained(copy.deepcopy(old.state_dict()))
        found.append([stage.corrections.context.peak_lr for stage in new.stages[:-1]])
    assert found == [[0.02, 0.2, 0.02, 0.2]] * 2


def test_a_momentum_that_comes_with_a_state_has_to_suit_corrections():
    def still(parameters):
        return torch.optim.SGD(parameters, lr=0.05)

    old = pipeline(optimizer=still)
    new = pipeline(stages=3, corrections=["spike"])
    before = copy.deepcopy(new.network.state_dict())
    with pytest.raises(ValueError, match="spike needs a momentum between 0 and 1"):
        new.load_drained(old.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in new.network.state_dict().items())


def test_memory_of_corrections_is_counted():
    plain, corrected = (pipeline(stages=3, corrections=names) for names in ([], ["discrepancy"]))
    for trainer in (plain, corrected):
        for x, y in batches(8):
            trainer.step(x, y)
        with MemoryProbe(trainer.executor):
            trainer.step(*next(batches(1)))
    for a, b, stage in zip(at_rest(plain.executor), at_rest(corrected.executor), plain.stages, strict=True):
        size = sum(p.numel() * 4 for p in stage.parameters)
        assert b.optimizer - a.optimizer == (0 if stage.last else size)


def test_a_run_resumes_with_other_stages(tmp_path):
    """Half-way and in flight, then at another cut; never with other corrections."""
    changes = {"corrections": ("predict", "shrink:0.9")}
    half = make_run(tmp_path / "run", **changes)
    half._epoch(threading.Event())
    half._finish_save()
    assert half.trainer.executor.in_flight
    assert json.loads((tmp_path / "run" / "config.json").read_text())["corrections"] == ["predict", "shrink:0.9"]
    with pytest.raises(ValueError, match="the checkpoint was written with corrections"):
        make_run(tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="the checkpoint was written with corrections"):
        make_run(tmp_path / "run", resume=True, stages=2, corrections=("predict",))
    half.close()
    half.trainer.drain()
    other = make_run(tmp_path / "run", resume=True, stages=3, **changes)
    assert other.trainer.evaluate(other.test.epoch(0)) == half.trainer.evaluate(half.test.epoch(0))
    summary = other()
    assert summary["corrections"] == ["predict", "shrink:0.9"]


def petra_train(*arguments):
    return main(["train", *SMALL, "--quiet", *map(str, arguments)])


def test_command_line(tmp_path, capsys):
    folder = tmp_path / "run"
    assert petra_train("--out", folder, "--corrections", "spike,shrink,predict", "--epochs", 1) == 0
    assert "petra + predict + shrink:0.9 + spike on 4 stages" in capsys.readouterr().out
    for name in ("config.json", "summary.json"):
        assert json.loads((folder / name).read_text())["corrections"] == ["predict", "shrink:0.9", "spike"]
    assert main(["train", "--resume", "--out", str(folder), "--corrections", "predict"]) == 2
    assert "has corrections ['predict', 'shrink:0.9', 'spike'], not ['predict']" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(folder), "--corrections", "spike,predict,shrink:0.9"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corrections", "predict", "--method", "backprop"], "backprop has no staleness to correct"),
        (["--corrections", "predict", "--momentum", "0"], "momentum of SGD, which is 0"),
        (
            ["--corrections", "spike", "--optimizer", "adamw"],
            "spike works with SGD with momentum, not with AdamW",
        ),
        (
            ["--corrections", "discrepancy", "--method", "delayed"],
            "the backward of delayed uses the weights of its forward",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_done(arguments, message, tmp_path, capsys):
    assert petra_train("--out", tmp_path / "run", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("text", "message"), [("predct", "did you mean 'predict'"), ("shrink:x", "like shrink:0.9")])
def test_unknown_names_on_the_command_line(text, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        petra_train("--corrections", text)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_comparison_corrects_where_there_is_something_to_correct(tmp_path):
    arguments = ["compare", *SMALL, "--quiet", "--epochs", "1", "--corrections", "predict", "--out", str(tmp_path)]
    assert main([*arguments, "--methods", "reversible", "petra"]) == 0
    said = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("reversible", "petra")]
    assert [summary["corrections"] for summary in said] == [[], ["predict"]]


def test_corrections_are_listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # nothing is wrapped
    assert main(["corrections"]) == 0
    header, _, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    names, _, examples, status = zip(*(re.split("  +", line) for line in lines), strict=True)
    assert header.split() == ["correction", "what", "it", "does", "--corrections", "status"]
    assert list(names) == list(CORRECTIONS)
    assert list(examples) == [kind.example for kind in CORRECTIONS.values()]
    assert [s == "experimental" for s in status] == [kind.experimental for kind in CORRECTIONS.values()]
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "corrections.md").read_text()
    assert all(f"`{name}" in guide for name in CORRECTIONS)


def test_nadamw(tmp_path):
    parameters = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
    optimizer = optimizers.nadamw(parameters, lr=0.1, weight_decay=0.3)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]
    assert all(g["betas"] == (0.99, 0.999) for g in optimizer.param_groups)
    assert petra_train("--out", tmp_path / "run", "--optimizer", "nadamw", "--lr", "0.003", "--beta2", "0.99") == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["optimizer"] == "nadamw"
    assert config["momentum"] is None
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.2


def test_look_ahead_is_as_written():
    """Docs of staleness, nadamw: NAdam's update, and that of SGD with Nesterov momentum."""
    torch.manual_seed(0)
    start, gradients = torch.randn(3, 2, dtype=torch.float64), torch.randn(30, 3, 2, dtype=torch.float64)
    lr, decay, b1, b2 = 0.02, 0.3, 0.99, 0.999
    found = [nn.Parameter(start.clone()) for _ in range(2)]
    nadamw = optimizers.nadamw([found[0]], lr=lr, weight_decay=decay)
    sgd = optimizers.sgd([found[1]], lr=lr, weight_decay=0.0)
    (momentum,) = (group["momentum"] for group in sgd.param_groups)
    w, plain, b, m, v = start.clone(), start.clone(), 0.0, 0.0, 0.0
    mu = [b1 * (1 - 0.96 ** (0.004 * t) / 2) for t in range(1, 32)]
    for t, g in enumerate(gradients, start=1):
        for parameter, optimizer in zip(found, (nadamw, sgd), strict=True):
            parameter.grad = g.clone()
            optimizer.step()
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        now, next_one = ((1 - mu[t - 1]) / (1 - prod(mu[:t])), mu[t] / (1 - prod(mu[: t + 1])))
        w = (1 - lr * decay) * w - lr * (now * g + next_one * m) / ((v / (1 - b2**t)).sqrt() + 1e-8)
        b = momentum * b + g
        plain = plain - lr * (g + momentum * b)
        torch.testing.assert_close(found[0].detach(), w, rtol=1e-7, atol=0)  # the product of μ is kept in float32
        torch.testing.assert_close(found[1].detach(), plain, rtol=1e-12, atol=1e-12)


def test_momentum_suits_the_optimizer():
    from petra.runs.config import RunConfig

    betas = {}
    for name in optimizers.OPTIMIZERS:
        (group,) = (
            RunConfig(model="revnet18", data="digits", optimizer=name)
            .make_optimizer([nn.Parameter(torch.ones(1))])
            .param_groups
        )
        betas[name] = group["momentum"] if name in ("sgd", "muon") else group["betas"]
    assert betas == {
        "sgd": 0.9,
        "adamw": (0.9, 0.999),
        "nadamw": (0.99, 0.999),
        "muon": 0.95,
        "soap": (0.95, 0.95),
    }
    assert group["betas"] == (0.95, 0.95)
    config = RunConfig(model="revnet18", data="digits", optimizer="nadamw", momentum=0.5)
    assert config.make_optimizer([nn.Parameter(torch.ones(1))]).param_groups[0]["betas"][0] == 0.5
