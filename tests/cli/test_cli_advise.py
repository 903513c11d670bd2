"""`petra advise`: recommendations that follow the documented rules, and commands that parse."""

import shlex

import pytest

from petra.cli.advise import recommended
from petra.cli.main import main
from petra.cli.options import given
from petra.cli.parser import build_parser
from petra.runs.advice import Situation, choices
from petra.runs.config import RunConfig

SMALL = ["--model", "revnet18", "--width", "4", "--depths", "1,1", "--image", "1x8x8", "--batch-size", "4"]


def first(**options):
    return choices(Situation(**{"kind": "convolutional", "reversible": True, "devices": 4, **options}))[0]


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        ({"devices": 1}, ("backprop", None, 1, "sgd")),
        ({}, ("petra", "low-staleness", 1, "sgd")),
        ({"microbatches": 100_000}, ("petra", "low-staleness", 8, "sgd")),
        ({"microbatches": 10_000}, ("petra", "low-staleness", 1, "sgd")),
        ({"reversible": False}, ("backprop", "1f1b", 16, "sgd")),
        ({"kind": "transformer"}, ("petra", "1f1b", 16, "adamw")),
        ({"kind": "transformer", "text": True}, ("petra", "1f1b", 16, "muon")),
        ({"kind": "transformer", "layers": 8, "max_accumulate": 6}, ("petra", "interleaved", 4, "adamw")),
    ],
)
def test_the_table_of_decisions(situation, expected):
    choice = first(**situation)
    assert (choice.method, choice.schedule, choice.accumulate, choice.optimizer) == expected
    assert choice.pipeline.stages == choice.stages  # the schedule exists
    assert all("docs/" in r or "experiments/" in r or "rule" in r or "waits" in r or "short" in r or "data" in r
               for r in choice.reasons)  # fmt: skip


def test_idle_time_and_delay():
    assert first(kind="transformer", devices=8).idle == pytest.approx(7 / (32 + 7))
    interleaved = first(kind="transformer", devices=8, layers=16, max_accumulate=8)
    assert (interleaved.stages, interleaved.idle) == (16, pytest.approx(7 / (2 * 8 + 7)))
    assert (first(devices=8).idle, first(devices=8).delay) == (0, 7)
    petra = choices(Situation("transformer", True, 8))[1]
    assert (petra.accumulate, petra.optimizer, petra.delay) == (16, "muon", 7 / 16)


def test_more_devices_than_layers():
    with pytest.raises(ValueError, match="there are 4 devices, but the network has only 3 layers"):
        first(layers=3)


def test_the_command_that_is_printed_can_be_run(capsys):
    assert main(["advise", *SMALL, "--devices", "3"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[0] == "petra"
    options = build_parser().parse_args(words[1:])
    config = RunConfig.from_options(None, {**given(options), "data": "digits"})
    assert (config.method, config.stages, options.ranks) == ("petra", 3, 3)
    assert config.corrections == ("inertia:4.0", "predict")
    assert config.model_options == {"width": 4, "depths": [1, 1]}
    config.validate()


def test_a_device_with_little_memory(capsys):
    deep = [*SMALL, "--depths", "4,4", "--batch-size", "256"]
    assert main(["advise", *deep, "--memory", "0.005"]) == 0
    shown = capsys.readouterr().out
    assert "* reversible backprop" in shown
    assert "(too much)" in shown
    assert "exact gradients without stored activations" in shown
    assert recommended([5, 3, 4], 2) == 1
    assert recommended([5, 3, 4], 9) == 0
    assert recommended([None, None], None) == 0


def test_data_and_recipes(capsys):
    assert main(["advise", "--recipe", "digits", "--devices", "4", "--epochs", "1000"]) == 0
    shown = capsys.readouterr().out
    assert "k = 8" in shown
    assert shown.splitlines()[-1].split()[:5] == ["petra", "train", "--recipe", "digits", "--data"]
    assert main(["advise", "--kind", "transformer", "--devices", "4"]) == 0
    assert 'schedule="1f1b"' in capsys.readouterr().out
    assert main(["advise", "--devices", "4"]) == 2
    assert "--model is missing" in capsys.readouterr().err
    assert main(["advise", "--recipe", "digits", "--image", "1x8x8"]) == 2
    assert "--image is given, but --data decides about it" in capsys.readouterr().err


def test_a_run_prints_its_warning_in_one_line(tmp_path, capsys):
    tiny = ["--model", "revnet18", "--width", "2", "--depths", "1,1", "--data", "synthetic:1x8x8:2:8", "--epochs", "1"]
    assert (
        main(["train", *tiny, "--lr", "0.5", "--stages", "4", "--batch-size", "4", "--out", str(tmp_path / "a")]) == 0
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if "updates late" in line]
    assert len(lines) == 1
    assert "--corrections predict,inertia:4, --lr 0.0" in lines[0]
    assert "--schedule 1f1b" in lines[0]
