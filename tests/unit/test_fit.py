"""`Trainer.fit` compared with the same loop written out, and resumed after every kind of interruption."""

import json
import signal
import warnings
import zipfile

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import petra
from petra.distributed import run_together
from petra.runs.config import RunConfig
from petra.trainer.checkpoint import load
from petra.trainer.sources import as_source


def make_trainer(transport=None, **options):
    torch.manual_seed(0)
    blocks = [petra.ReversibleBlock(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(2)]
    network = petra.Network(Split(), *blocks, Join())
    options = {"stages": 4, "accumulate": 2, "optimizer": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)} | options
    return petra.Trainer(network, loss=cross_entropy, transport=transport, **options)


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, x):
        x = self.linear(x)
        return x, x


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x1, x2):
        return self.linear(x1 + x2)


def data(batches=6, size=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches * size, 5, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(-1))


def loader(**options):
    return DataLoader(data(), batch_size=4, shuffle=True, **options)


TEST = list(DataLoader(data(2, seed=2), batch_size=4))


class Died(Exception):
    """Raised by a test in the middle of a training."""


class DieAt(petra.Callback):
    """Ends a training after a step, as a crash would."""

    def __init__(self, step):
        self.step = step

    def on_update(self, loop):
        if loop.step == self.step:
            raise Died


def weights(trainer):
    return {name: value.clone() for name, value in trainer.network.state_dict().items()}


def assert_equal(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_fit_is_the_loop_written_out():
    trainer, plain = make_trainer(), make_trainer()
    result = trainer.fit(list(loader(generator=torch.Generator().manual_seed(3))), TEST, epochs=3, quiet=True)
    batches, losses = list(loader(generator=torch.Generator().manual_seed(3))), []
    evaluations = []
    for epoch in range(3):
        for x, y in batches:
            losses += [float(found.loss) for found in plain.step(x, y)]
        if epoch == 2:
            losses += [float(found.loss) for found in plain.drain()]
        evaluations.append(plain.evaluate(TEST))
    assert_equal(weights(trainer), weights(plain))
    assert [record["test_loss"] for record in result.records] == [found.loss for found in evaluations]
    assert sum(record["train_loss"] for record in result.records) / 3 == pytest.approx(sum(losses) / 18, rel=0.1)
    assert (result.steps, result.epochs, result.test_loss) == (9, 3, evaluations[-1].loss)
    assert trainer.updates == dict.fromkeys(range(4), 9)


@pytest.mark.parametrize("method", ["petra", "reversible"])
def test_steps_are_updates_of_every_stage(method):
    options = {"stages": 1} if method == "reversible" else {}
    trainer = make_trainer(method=method, **options)
    result = trainer.fit(loader(), TEST, max_steps=7, eval_every=3, log_every=2, quiet=True)
    assert set(trainer.updates.values()) == {7}
    assert (result.steps, result.epochs) == (7, pytest.approx(14 / 6, abs=1e-4))
    evaluated = [record["step"] for record in result.records if "test_loss" in record]
    assert evaluated == [3, 6, 7]
    assert [record["step"] for record in result.records] == [2, 3, 4, 6, 7]


def test_logged_losses_are_those_since_the_last_record():
    result = make_trainer(method="backprop", stages=1).fit(loader(), max_steps=6, log_every=1, eval_every=3, quiet=True)
    first, second, third = (record["train_loss"] for record in result.records[:3])
    alone = make_trainer(method="backprop", stages=1)
    batches = [batch for epoch in range(2) for batch in as_source(loader()).epoch(epoch)]
    losses = [float(found.loss) for x, y in batches for found in alone.step(x, y)]
    assert first == pytest.approx(sum(losses[:2]) / 2)
    assert second == pytest.approx(sum(losses[2:4]) / 2)
    assert third == pytest.approx(sum(losses[:6]) / 6)  # of the evaluation


@pytest.mark.parametrize(("every", "died"), [(None, 1), (2, 4), (None, 6), (2, 6), (2, 8)])
def test_resumed_training_equals_an_uninterrupted_one(tmp_path, every, died):
    arguments = {"epochs": 3, "eval_every": every, "log_every": 3, "quiet": True}
    whole = make_trainer()
    expected = whole.fit(loader(), TEST, out=tmp_path / "whole", **arguments)
    with pytest.raises(Died):
        make_trainer().fit(
            loader(), TEST, out=tmp_path / "run", checkpoint_every=1, callbacks=[DieAt(died)], **arguments
        )
    torch.rand(7)  # the random numbers of the program do not matter
    again = make_trainer()
    found = again.fit(loader(), TEST, out=tmp_path / "run", resume=True, **arguments)
    assert_equal(weights(again), weights(whole))
    for records in (expected.records, found.records):
        for record in records:
            del record["seconds"], record["samples_per_second"]
    assert found.records == expected.records
    names = ("best.safetensors", "weights.safetensors")
    assert all((tmp_path / "run" / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert make_trainer().fit(loader(), TEST, out=tmp_path / "run", resume=True, **arguments).steps == found.steps
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


class Writes:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return type(self.path).touch, (self.path,)


def test_a_checkpoint_runs_no_code(tmp_path):
    make_trainer().fit(loader(), max_steps=2, out=tmp_path / "run", quiet=True)
    found = [path for path in (tmp_path / "run" / "checkpoint").rglob("*") if zipfile.is_zipfile(path)]
    assert found
    for path in found:
        torch.save({**load(path), "more": Writes(tmp_path / "written")}, path)
    with pytest.raises(ValueError, match="is not a complete checkpoint"):
        make_trainer().fit(loader(), max_steps=4, out=tmp_path / "run", resume=True, quiet=True)
    assert not (tmp_path / "written").exists()
    torch.load(found[0], weights_only=False)  # the file would have run it
    assert (tmp_path / "written").exists()


def test_a_longer_training_continues_a_finished_one(tmp_path):
    make_trainer().fit(loader(), epochs=1, out=tmp_path, quiet=True)
    again = make_trainer()
    assert again.fit(loader(), epochs=2, out=tmp_path, resume=True, quiet=True).epochs == 2
    assert set(again.updates.values()) == {6}


def test_ranks_train_as_one_process(tmp_path):
    alone = make_trainer()
    expected = alone.fit(loader(), TEST, max_steps=8, eval_every=2, out=tmp_path / "alone", quiet=True)

    def work(transport):
        trainer = make_trainer(transport)
        result = trainer.fit(loader(), TEST, max_steps=8, eval_every=2, out=tmp_path / "ranks", quiet=True)
        return result, trainer.updates

    found = run_together(work, 2)
    assert {result.test_loss for result, _ in found} == {expected.test_loss}
    assert found[0][1] | found[1][1] == alone.updates
    for name in ("best.safetensors", "weights.safetensors"):
        assert (tmp_path / "ranks" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_best_weights_are_those_of_the_best_evaluation(tmp_path):
    class Keep(petra.Callback):
        def __init__(self):
            self.found = {}

        def on_evaluate(self, loop, evaluation):
            self.found[loop.step] = (evaluation.loss, weights(loop.trainer))

    keep = Keep()
    options = {"optimizer": lambda p: torch.optim.SGD(p, 0.6)}
    arguments = {"max_steps": 12, "eval_every": 1, "monitor": "loss", "callbacks": [keep], "quiet": True}
    result = make_trainer(**options).fit(loader(), TEST, out=tmp_path, **arguments)
    step = min(keep.found, key=lambda step: keep.found[step][0])
    assert (result.best_step, result.best) == (step, keep.found[step][0])
    assert step < 12
    from safetensors.torch import load_file

    assert_equal(load_file(tmp_path / "best.safetensors"), keep.found[step][1])


def test_best_weights_of_a_lost_future_are_dropped(tmp_path):
    """A crash after better weights were written, but before a checkpoint: the training resumes before them."""
    slow = {"optimizer": lambda p: torch.optim.SGD(p, 0.01), "method": "reversible", "stages": 1}
    arguments = {"max_steps": 12, "eval_every": 1, "monitor": "loss", "quiet": True, "out": tmp_path}
    with pytest.raises(Died):
        make_trainer(**slow).fit(TEST * 3, TEST, checkpoint_every=4, callbacks=[DieAt(8)], **arguments)
    assert (tmp_path / "pending-best.safetensors").exists()
    before = (tmp_path / "best.safetensors").read_bytes()

    class Look(petra.Callback):
        def on_start(self, loop):
            assert not (tmp_path / "pending-best.safetensors").exists()
            assert (tmp_path / "best.safetensors").read_bytes() == before

    make_trainer(**slow).fit(TEST * 3, TEST, resume=True, callbacks=[Look()], **arguments)


def test_a_training_shorter_than_the_default_warm_up_warns():
    def fit(scheduler=None, **options):
        net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3))
        trainer = petra.Trainer(
            net, method="delayed", stages=2, accumulate=2, loss=cross_entropy, scheduler=scheduler, corrections=()
        )
        trainer.fit([(torch.randn(2, 2), torch.tensor([0, 1]))] * 4, quiet=True, **options)

    for options in ({"epochs": 3}, {"epochs": 500, "max_steps": 6}):
        with pytest.warns(UserWarning, match="the training has 6 updates, and the default learning rate rises for 200"):
            fit(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(max_steps=200)
        fit(epochs=3, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 7))


def test_early_stopping_counts_evaluations_without_an_improvement(tmp_path):
    frozen = {"optimizer": lambda p: torch.optim.SGD(p, 0.0)}
    arguments = {"early_stopping": petra.EarlyStopping(3, min_delta=1e-9), "quiet": True}
    result = make_trainer(**frozen).fit(loader(), TEST, epochs=20, **arguments)
    assert (result.stopped_early, result.epochs, result.steps) == (True, 4, 12)
    result = make_trainer(**frozen).fit(loader(), TEST, max_steps=50, eval_every=2, **arguments)
    assert (result.stopped_early, result.steps) == (True, 8)
    with pytest.raises(Died):
        make_trainer(**frozen).fit(
            loader(), TEST, epochs=20, out=tmp_path, checkpoint_every=1, callbacks=[DieAt(10)], **arguments
        )
    again = make_trainer(**frozen).fit(loader(), TEST, epochs=20, out=tmp_path, resume=True, **arguments)
    assert (again.stopped_early, again.epochs) == (True, 4)
    assert make_trainer(**frozen).fit(loader(), TEST, epochs=20, out=tmp_path, resume=True, **arguments).epochs == 4


def test_callbacks_see_every_event_in_order(tmp_path):
    events, checkpoints = [], []

    class Note(petra.Callback):
        def on_start(self, loop):
            events.append("start")

        def on_update(self, loop):
            events.append(f"update {loop.step}")

        def on_log(self, loop, record):
            events.append(f"log {record['step']}")

        def on_evaluate(self, loop, evaluation):
            events.append(f"evaluate {evaluation.samples}")
            if loop.step == 4:
                loop.stop()

        def on_checkpoint(self, loop):
            checkpoints.append(loop.step)

        def on_end(self, loop):
            events.append(f"end {loop.progress.finished}")

    options = {"schedule": "1f1b"}
    make_trainer(**options).fit(loader(), TEST, epochs=9, eval_every=2, out=tmp_path, callbacks=[Note()], quiet=True)
    assert events == [
        *("start", "update 1", "update 2", "evaluate 8", "log 2", "update 3", "update 4", "evaluate 8", "log 4"),
        "end True",
    ]
    assert checkpoints in ([3, 4, 4], [4, 4, 4])  # the first one is written while training goes on


def test_the_order_of_a_loader_depends_on_seed_and_epoch():
    def order(seed, epoch, start=0, **options):
        return [y.tolist() for _, y in as_source(loader(**options), seed).epoch(epoch, start)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0, 2) == order(0, 0)[2:]
    assert order(0, 0) != order(0, 1) != order(1, 1)
    state = torch.get_rng_state()
    order(0, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_given_generator_keeps_its_numbers(tmp_path):
    def make():
        return loader(generator=torch.Generator().manual_seed(5))

    whole = make_trainer()
    whole.fit(make(), epochs=3, quiet=True)
    with pytest.raises(Died):
        make_trainer().fit(make(), epochs=3, out=tmp_path, checkpoint_every=1, callbacks=[DieAt(5)], quiet=True)
    again = make_trainer()
    again.fit(make(), epochs=3, out=tmp_path, resume=True, quiet=True)
    assert_equal(weights(again), weights(whole))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata with torch 2.13
@pytest.mark.parametrize("died", [2, 4])
def test_a_stateful_loader_continues_where_it_was(tmp_path, died):
    module = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        return module.StatefulDataLoader(data(), batch_size=4, shuffle=True)

    whole = make_trainer()
    whole.fit(make(), epochs=3, quiet=True)
    with pytest.raises(Died):
        make_trainer().fit(make(), epochs=3, out=tmp_path, checkpoint_every=1, callbacks=[DieAt(died)], quiet=True)
    again = make_trainer()
    again.fit(make(), epochs=3, out=tmp_path, resume=True, quiet=True)
    assert_equal(weights(again), weights(whole))


def test_live_values_are_readable():
    trainer = make_trainer(
        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5), schedule=[3, 2, 1, 0], accumulate=1
    )
    assert trainer.staleness == [3, 2, 1, 0]
    assert make_trainer(schedule="1f1b").staleness == [0, 0, 0, 0]
    assert trainer.last_loss is None
    for x, y in list(loader())[:4]:
        found = trainer.step(x, y)
    assert trainer.last_loss == float(found[-1].loss)
    assert list(trainer.updates.values()) == [stage.updates for stage in trainer.stages] == [1, 2, 2, 3]
    assert trainer.learning_rates() == {s: [0.05 * 0.5 ** trainer.updates[s]] for s in range(4)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "fit has no end: give epochs, max_steps, or both"),
        ({"epochs": 0}, "epochs is 0: give 1 or more"),
        ({"epochs": 1, "resume": True}, "resume is True, but there is no folder"),
        ({"epochs": 1, "callbacks": [print]}, "is no callback"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_trainer().fit(loader(), **arguments)


def test_impossible_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="training data is a int"):
        make_trainer().fit(3, epochs=1)
    with pytest.raises(ValueError, match=r"a batch of the training data is a dict: give \(inputs, targets\)"):
        make_trainer().fit([{"x": 1}], epochs=1, quiet=True)
    with pytest.raises(ValueError, match=r"no batches in epoch 2: .* not a generator"):
        make_trainer().fit((batch for batch in TEST), epochs=2, quiet=True)
    make_trainer().fit(TEST, epochs=1, out=tmp_path, quiet=True)
    with pytest.raises(ValueError, match="holds a training already: give resume=True"):
        make_trainer().fit(TEST, epochs=1, out=tmp_path, quiet=True)


def test_an_interrupted_training_says_how_to_continue(tmp_path):
    class Interrupt(petra.Callback):
        def on_update(self, loop):
            signal.raise_signal(signal.SIGINT)

    options = {"epochs": 3, "callbacks": [Interrupt()], "quiet": True}
    with pytest.raises(petra.Interrupted, match=r"stopped in epoch 1; nothing is saved: give fit\(..., out=FOLDER\)"):
        make_trainer().fit(TEST * 4, **options)
    with pytest.raises(petra.Interrupted, match=r"stopped in epoch 1; fit\(..., out='.*mine', resume=True\) continues"):
        make_trainer().fit(TEST * 4, out=tmp_path / "mine", **options)
    result = make_trainer().fit(TEST * 4, out=tmp_path / "mine", epochs=1, resume=True, quiet=True)
    assert result.steps == 4


def test_summary_and_metrics_are_written(tmp_path):
    trainer = make_trainer()
    result = trainer.fit(loader(), TEST, epochs=2, out=tmp_path, quiet=True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["test_accuracy"] == result.test_accuracy
    assert summary["staleness"] == [3, 2, 1, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("best.safetensors", "checkpoint", "metrics.jsonl", "summary.json", "weights.safetensors")
    ]


def test_the_default_number_of_stages_is_that_of_the_command_line():
    assert make_trainer(stages=None).layout["stages"] == [1, 1, 1, 1]
    for layers, stages in ((2, 2), (6, 4)):
        net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        trainer = petra.Trainer(net, loss=cross_entropy, optimizer=lambda p: torch.optim.SGD(p, 0.01))
        assert len(trainer.layout["stages"]) == stages
    assert RunConfig.from_options(None, {"model": "revnet18", "data": "digits"}).stages == 4
