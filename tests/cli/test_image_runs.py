"""`petra train` on image files: the recipe of the paper, worker processes, ranks, replicas, resume, mixup."""

import json
import signal
from pathlib import Path

import pytest
import torch
from helpers.data_files import refused
from helpers.image_files import made_image, write_folder

import petra
from petra.cli.main import main
from petra.distributed import run_together
from petra.runs.config import ADDED, RunConfig
from petra.runs.run import Run
from petra.trainer.interrupts import Interrupted


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images") / "pets", {"train": 6, "val": 3})


def config(folder: Path, **options) -> RunConfig:
    small = {"model_options": {"width": 2, "depths": [1, 1]}, "image_size": 32, "epochs": 2, "batch_size": 4}
    quick = {"accumulate": 2, "warmup_epochs": 0.5, "stages": 3, "lr": 0.1, "workers": 0, "data": str(folder)}
    return RunConfig.from_options("petra-imagenet", {**small, **quick, **options})


def train(folder: Path, out: Path, transport=None, resume: bool = False, **options) -> dict:
    run = Run(config(folder, **options), out, quiet=True, transport=transport, resume=resume, device="cpu")
    return run()


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("run") / "run"
    return out, train(folder, out)


def test_the_recipe_is_that_of_the_paper(trained) -> None:
    recipe = RunConfig.from_options("petra-imagenet", {"data": "x"})
    assert (recipe.image_size, recipe.augment, recipe.batch_size, recipe.accumulate) == (224, "crop-flip", 64, 32)
    network = json.loads((trained[0] / "network.json").read_text())
    assert network["mean"] == [0.485, 0.456, 0.406]
    assert network["std"] == [0.229, 0.224, 0.225]
    assert network["class_names"] == ["class0", "class1", "class2"]
    assert petra.load(trained[0])(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


def test_neither_workers_nor_ranks_change_the_weights(folder, trained, tmp_path) -> None:
    wanted = trained[1]["weights_sha256"]
    assert train(folder, tmp_path / "workers", workers=2)["weights_sha256"] == wanted

    def work(transport) -> tuple[dict, torch.Tensor]:
        run = Run(config(folder), tmp_path / "ranks", quiet=True, transport=transport, device="cpu")
        return run(), next(run.train.epoch(0))[0]

    first, last = run_together(work, ranks=2)
    assert last[0]["weights_sha256"] == wanted
    assert first[1].any()
    assert not last[1].any()  # the rank of the last stage decodes no images


def test_a_run_continues_with_another_number_of_workers(folder, trained, tmp_path) -> None:
    def stop(run: Run) -> None:
        def observe(tick, action, stage) -> None:
            if tick == 7 and stage.index == 0 and action.kind == "F":
                signal.raise_signal(signal.SIGINT)

        run.trainer.executor.observers.append(observe)

    Run.on_start.append(stop)
    try:
        with pytest.raises(Interrupted):
            train(folder, tmp_path, workers=1)
    finally:
        Run.on_start.remove(stop)
    assert train(folder, tmp_path, resume=True)["weights_sha256"] == trained[1]["weights_sha256"]


def test_two_replicas_get_the_images_of_one(folder, tmp_path) -> None:
    def work(transport) -> list[tuple[torch.Tensor, torch.Tensor]]:
        run = Run(config(folder, replicas=2), tmp_path, quiet=True, transport=transport, device="cpu")
        batches = list(run.train.epoch(1))
        run.close()
        return batches

    parts = run_together(work, ranks=1, replicas=2)
    run = Run(config(folder), tmp_path / "one", quiet=True, device="cpu")
    whole = list(run.train.epoch(1))
    run.close()
    for (x, y), *pieces in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat([piece[0] for piece in pieces]), x)
        assert torch.equal(torch.cat([piece[1] for piece in pieces]), y)


def test_evaluation_uses_the_crop_in_the_centre(folder, trained, tmp_path, capsys) -> None:
    assert main(["evaluate", str(trained[0]), "--json", "--device", "cpu", "--threads", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["test_accuracy"] == trained[1]["test_accuracy"]
    assert found["test_loss"] == pytest.approx(trained[1]["test_loss"], rel=1e-5)
    assert found["samples"] == 9
    only = tmp_path / "val"
    for label in range(3):
        (only / f"class{label}").mkdir(parents=True)
        made_image(label, label).save(only / f"class{label}" / "a.png")
    arguments = ["evaluate", str(trained[0]), "--data", str(tmp_path), "--threads", "1", "--device", "cpu"]
    assert main(arguments) == 0
    assert "(3 images)" in capsys.readouterr().out


def test_mixed_images_train(folder, tmp_path) -> None:
    summary = train(folder, tmp_path, mixup=0.2, cutmix=1.0, label_smoothing=0.1, augment="randaugment")
    assert summary["test_accuracy"] >= 0
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert 0 <= record["train_accuracy"] <= 1


def test_runs_of_older_versions_are_read(folder, trained) -> None:
    values = json.loads((trained[0] / "config.json").read_text())
    for name in ADDED:
        del values[name]
    older = RunConfig.from_json(values)
    assert older == RunConfig(**{**values, "lr_milestones": tuple(values["lr_milestones"]), "corrections": ()})
    assert (older.image_size, older.augment, older.mixup, older.image_backend) == (None, None, 0.0, "pillow")


def test_options_on_the_command_line(folder, tmp_path, capsys) -> None:
    small = ["train", "--recipe", "petra-imagenet", "--data", str(folder), "--out", str(tmp_path), "--threads", "1"]
    small += ["--width", "2", "--depths", "1", "--device", "cpu", "--quiet", "--image-size", "32", "--workers", "0"]
    for option, words in (
        (["--augment", "flip"], "--augment is 'flip': did you mean 'crop-flip'?"),
        (["--mixup", "-1"], "--mixup is -1"),
        (["--test-fraction", "1"], "--test-fraction is 1"),
        (["--image-size", "0"], "--image-size is 0: give 1 or more"),
        (["--workers", "-1"], "--workers is -1: give 0 or more"),
        (["--test-fraction", "0.1"], "has val/: leave it out"),
    ):
        try:
            code = main([*small, *option])
        except SystemExit as error:
            code = error.code
        assert code
        assert words in capsys.readouterr().err
    bad = folder / "train" / "class0" / "z.jpg"
    bad.write_bytes(b"x")
    try:
        with refused("class0/z.jpg", "not a readable image"):
            train(folder, tmp_path / "bad", workers=1)
    finally:
        bad.unlink()
