"""`petra train`: steps, best weights, averages, clipping, optimizers by name, config files, loggers and dry runs."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

import petra
from petra.cli.main import main
from petra.runs.config import RunConfig
from petra.trainer.optimizers_by_name import find_optimizer

SMALL = ["--model", "revnet18", "--width", "4", "--depths", "1,1", "--data", "synthetic:1x4x4:3:40", "--stages", "3"]
SMALL += ["--batch-size", "10", "--lr", "0.05", "--quiet", "--device", "cpu"]


def train(folder, *options):
    return main(["train", *SMALL, *map(str, options), "--out", str(folder)])


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps") / "run"
    options = ["--accumulate", 2, "--max-steps", 7, "--eval-every", 3, "--log-every", 2, "--ema", 0.5]
    assert train(folder, *options, "--clip-norm", 1, "--clip", "global", "--monitor", "loss") == 0
    return folder


def test_steps_on_the_command_line(steps):
    found = records(steps)
    assert [record["step"] for record in found] == [2, 3, 4, 6, 7]
    assert ["ema_test_loss" in record for record in found] == [False, True, False, True, True]
    assert (summary(steps)["steps"], summary(steps)["ema_test_loss"]) == (7, found[-1]["ema_test_loss"])


def test_best_and_averaged_weights_are_loaded_and_evaluated(steps, capsys):
    for kind, file in (("last", "weights"), ("best", "best"), ("ema", "ema")):
        network, weights = petra.load(steps, weights=kind), load_file(steps / f"{file}.safetensors")
        assert all(torch.equal(value, weights[name]) for name, value in network.state_dict().items())
    capsys.readouterr()
    losses = {}
    for kind in ("last", "best", "ema"):
        assert main(["evaluate", str(steps), "--weights", kind, "--json", "--device", "cpu"]) == 0
        losses[kind] = json.loads(capsys.readouterr().out)["test_loss"]
    assert losses["last"] == pytest.approx(summary(steps)["test_loss"])
    assert losses["ema"] == pytest.approx(summary(steps)["ema_test_loss"])
    best = min(record["ema_test_loss"] for record in records(steps) if "ema_test_loss" in record)
    assert losses["best"] == pytest.approx(best)
    with pytest.raises(ValueError, match="weights is 'first': choose from last, best, ema"):
        petra.load(steps, weights="first")


def test_runs_without_them_say_so(tmp_path):
    assert train(tmp_path / "run", "--epochs", 1, "--no-save-best") == 0
    assert "best.safetensors" not in {path.name for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match=r"best\.safetensors does not exist: the run was trained with --no-save-best"):
        petra.load(tmp_path / "run", weights="best")
    with pytest.raises(ValueError, match=r"ema\.safetensors does not exist: the run was trained without --ema"):
        petra.load(tmp_path / "run", weights="ema")


def test_early_stopping_on_the_command_line(tmp_path):
    assert train(tmp_path / "run", "--epochs", 9, "--lr", 0, "--patience", 2, "--min-delta", 0.1) == 0
    assert summary(tmp_path / "run")["stopped_early"]
    assert len(records(tmp_path / "run")) == 4  # the last one after the pipeline was drained


def test_a_short_training_has_a_short_warm_up(tmp_path, capsys):
    folder = tmp_path / "run"
    loud = [word for word in SMALL if word != "--quiet"]
    assert main(["train", *loud, "--epochs", "1", "--out", str(folder)]) == 0
    assert "warm-up" not in capsys.readouterr().err
    config = RunConfig.read(folder / "config.json")
    assert config.curve(4).warmup_epochs == 0.25
    assert main(["train", *loud, "--epochs", "1", "--warmup-epochs", "3", "--out", str(tmp_path / "b")]) == 0
    assert "3 epochs of warm-up for 1 of training: the learning rate never reaches" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "name", "settings"),
    [
        (["adagrad"], "Adagrad", {"lr": 0.05}),
        (
            ["torch.optim.RMSprop", "--set-optimizer", "alpha=0.9", "--momentum", "0.5"],
            "RMSprop",
            {"alpha": 0.9, "momentum": 0.5},
        ),
        (["radam", "--beta2", "0.99", "--weight-decay", "0.1"], "RAdam", {"betas": (0.9, 0.99), "weight_decay": 0.1}),
        (["torch.optim.nadam:NAdam", "--set-optimizer", "betas=0.8,0.9"], "NAdam", {"betas": (0.8, 0.9)}),
    ],
)
def test_optimizers_by_name(tmp_path, options, name, settings):
    assert train(tmp_path / "run", "--epochs", 1, "--optimizer", *options) == 0
    config = RunConfig.read(tmp_path / "run" / "config.json")
    optimizer = config.make_optimizer([torch.nn.Parameter(torch.zeros(2, 2))])
    assert type(optimizer).__name__ == name
    assert {key: optimizer.param_groups[0][key] for key in settings} == settings
    assert train(tmp_path / "run", "--resume", "--optimizer", *options) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optimizer", "adagard"], "did you mean 'adagrad'?"),
        (["--optimizer", "rmsprop", "--set-optimizer", "alhpa=1"], "rmsprop takes no alhpa: did you mean 'alpha'?"),
        (["--optimizer", "nowhere.to:Find"], "--optimizer is nowhere.to:Find: No module named 'nowhere'"),
        (["--optimizer", "torch.optim:lr_scheduler"], "which is a module: give a class or a function"),
        (["--set-optimizer", "alpha=1"], "--set-optimizer gives alpha, but sgd takes --lr"),
        (["--clip", "global"], "--clip is global, but there is no --clip-norm"),
        (["--min-delta", "1"], "--min-delta is 1, but without --patience"),
        (["--logger", "tensorbord"], "--logger is 'tensorbord': did you mean 'tensorboard'?"),
    ],
)
def test_mistakes_are_explained(tmp_path, capsys, options, message):
    try:
        code = train(tmp_path / "run", *options)
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_every_optimizer_of_torch_is_found():
    for name in ("Adadelta", "Adamax", "ASGD", "Rprop", "torch.optim.Adafactor"):
        assert find_optimizer(name).__name__ == name.split(".")[-1]


FILES = {
    "run.toml": 'model = "revnet18"\nwidth = 4\ndepths = [1, 1]\ndata = "synthetic:1x4x4:3:40"\nstages = 3\n'
    'epochs = 1\nbatch-size = 10\nlr = 1\nlr_milestones = [0.5]\ncorrections = ["shrink:0.9"]\n',
    "run.yaml": "model: revnet18\nmodel_options: {width: 4, depths: [1, 1]}\ndata: synthetic:1x4x4:3:40\nstages: 3\n"
    "epochs: 1\nbatch_size: 10\nlr: 1e-1\nlr_milestones: 0.5\ncorrections: shrink:0.9\n",
}


@pytest.mark.parametrize("name", FILES)
def test_options_from_a_file(tmp_path, name):
    (tmp_path / name).write_text(FILES[name])
    command = ["train", "--config", str(tmp_path / name), "--lr", "0.05", "--quiet", "--device", "cpu"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    config = RunConfig.read(tmp_path / "run" / "config.json")
    assert config.model_options == {"width": 4, "depths": [1, 1]}
    assert (config.lr, config.lr_milestones, config.corrections) == (0.05, (0.5,), ("shrink:0.9",))
    again = ["train", "--config", str(tmp_path / "run" / "config.json"), "--quiet", "--device", "cpu"]
    assert main([*again, "--out", str(tmp_path / "again")]) == 0
    assert summary(tmp_path / "again")["weights_sha256"] == summary(tmp_path / "run")["weights_sha256"]


def test_a_file_may_name_a_recipe(tmp_path):
    (tmp_path / "run.toml").write_text('recipe = "digits"\ndata = "synthetic:1x4x4:3:40"\nepochs = 1\n')
    assert main(["train", "--config", str(tmp_path / "run.toml"), "--quiet", "--out", str(tmp_path / "run")]) == 0
    assert RunConfig.read(tmp_path / "run" / "config.json").batch_size == 32


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.toml", "epocs = 1", "there is no option epocs: did you mean 'epochs'?"),
        ("run.toml", "tensorboard = true", "tensorboard is not read from a file: give --tensorboard on"),
        ("run.toml", "epochs = 'many'", "epochs is 'many': give a whole number"),
        ("run.toml", "epochs = 1.5", "epochs is 1.5: give a whole number"),
        ("run.yaml", "epochs: [1", "run.yaml is damaged"),
        ("run.toml", "epochs =", "run.toml is damaged"),
        ("run.yaml", "- 1", "is not a table of options"),
        ("run.ini", "", "give a .yaml, .toml or .json file, not .ini"),
        ("run.toml", "nesterov = 1", "nesterov is 1: give true or false"),
        ("run.toml", "model_options = 1", "model_options is 1: give a table"),
    ],
)
def test_files_with_mistakes_are_refused(tmp_path, capsys, name, text, message):
    (tmp_path / name).write_text(text)
    assert train(tmp_path / "run", "--config", tmp_path / name) == 2
    assert message in capsys.readouterr().err


def test_yaml_names_its_package(tmp_path, capsys, monkeypatch):
    (tmp_path / "run.yaml").write_text("epochs: 1")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert train(tmp_path / "run", "--config", tmp_path / "run.yaml") == 2
    assert "pip install 'petra[yaml]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [[], ["--ranks", "3"], ["--ema", "0.9", "--optimizer", "muon"], ["--schedule", "1f1b"]]
)
def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys, options):
    assert train(tmp_path / "run", "--dry-run", "--accumulate", 2, "--max-steps", 6, *options) == 0
    out = capsys.readouterr().out
    assert "4 micro-batches of 10 per epoch, 2 per update; 6 updates in 3 epochs" in out
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit() and "MiB" in line]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert [float(row[3]) for row in rows] == (
        [0, 0, 0] if options[-1:] in (["1f1b"], ["--schedule=1f1b"]) else [1, 0.5, 0]
    )
    assert "predicted: " in out
    assert list(tmp_path.iterdir()) == []
