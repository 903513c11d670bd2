"""`petra memory`: Figure 5 of Features Replay from the command line."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from petra import Trainer, models
from petra.cli.main import main
from petra.measure import Activations, memory_figure

pytestmark = pytest.mark.slow

SMALL = ["--model", "resnet164-basic", "--depths", "2,2", "--width", "4", "--image", "3x8x8", "--batch-size", "2"]


def counted_for_real(method, stages):
    network = models.create("resnet164-basic", depths=(2, 2), width=4)
    trainer = Trainer(
        network, loss=cross_entropy, optimizer=lambda p: torch.optim.SGD(p, 0.01), method=method, stages=stages
    )
    for _ in range(stages + 2):
        with Activations(trainer.executor) as found:
            trainer.step(torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))
    return [found.stages[s] for s in range(stages)]


def test_it_counts_what_a_real_run_has(tmp_path, capsys):
    assert main(["memory", *SMALL, "--stages", "1,3", "--out", str(tmp_path), "--quiet"]) == 0
    written = json.loads((tmp_path / "memory.json").read_text())
    assert written["image"] == [3, 8, 8]
    assert written["model_options"]["width"] == 4
    found = written["bytes_of_stages"]
    for method in ("backprop", "petra", "features-replay", "ddg", "dni"):
        assert found[method]["3"] == counted_for_real(method, 3)
        assert found[method]["1"] == found["backprop"]["1"]
    whole = {method: sum(found[method]["3"]) for method in found}
    assert whole["features-replay"] < 1.25 * whole["backprop"]
    assert whole["ddg"] > 2 * whole["backprop"]
    assert whole["dni"] > whole["backprop"]
    lines = capsys.readouterr().out.splitlines()
    sizes, ratios = lines[: lines.index("")], lines[lines.index("") + 1 : -1]
    assert " ".join(sizes[0].split()) == "MiB J = 1 J = 3"
    assert " ".join(ratios[0].split()) == "relative to backprop J = 1 J = 3"
    names = ["backprop", "petra", "features-replay", "ddg", "dni"]
    assert [line.split()[0] for line in sizes[2:]] == [line.split()[0] for line in ratios[2:]] == names
    assert sizes[5].split() == ["ddg", *(f"{sum(found['ddg'][k]) / 2**20:.2f}" for k in ("1", "3"))]
    assert ratios[5].split()[-1] == f"{whole['ddg'] / whole['backprop']:.2f}"
    assert max(map(len, lines[:-1])) <= 80


def test_resnet101_on_cifar_s_shapes(tmp_path):
    """With four modules, Features Replay is within 1.25 of backprop, DDG above twice, and DNI in between."""
    asked = ["memory", "--model", "resnet101-cifar", "--methods", "backprop,features-replay,ddg,dni", "--stages", "4"]
    assert main([*asked, "--out", str(tmp_path), "--quiet"]) == 0
    found = json.loads((tmp_path / "memory.json").read_text())["bytes_of_stages"]
    sums = {method: sum(counts["4"]) for method, counts in found.items()}
    assert sums["backprop"] <= sums["features-replay"] <= 1.25 * sums["backprop"]
    assert sums["ddg"] > 2 * sums["backprop"]
    assert sums["features-replay"] < sums["dni"] < sums["ddg"]


def test_pipelined_methods_take_an_order(tmp_path):
    reversible = ["--model", "revnet18", "--depths", "2,2", *SMALL[4:], "--methods", "backprop,petra", "--stages", "3"]
    found = []
    for schedule in ("locked-forward", "lock-step"):
        assert main(["memory", *reversible, "--schedule", schedule, "--out", str(tmp_path), "--quiet"]) == 0
        found.append(json.loads((tmp_path / "memory.json").read_text())["bytes_of_stages"])
    assert found[0]["backprop"] == found[1]["backprop"]
    assert sum(found[0]["petra"]["3"]) < sum(found[1]["petra"]["3"])  # fewer inputs of what is not reversible


def test_it_is_drawn_where_that_can_be(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    asked = ["memory", *SMALL, "--methods", "backprop", "--stages", "2", "--out", str(tmp_path), "--quiet"]
    assert main(asked) == 0
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(memory_figure, "find_spec", lambda name: None)
    assert main(asked) == 0
    assert "no figure: pip install matplotlib" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages", "2,7"], "stages is 7, but the network has only 6 layers"),
        (["--stages", "0"], "stages is 0"),
        (["--methods", "feature-replay"], "did you mean 'features-replay'?"),
        (["--methods", "petra", "--schedule", "alphabetical"], "alphabetical"),
        (
            ["--methods", "backprop", "ddg", "--schedule", "lock-step"],
            "which backprop and ddg cannot use: leave it out",
        ),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--vocab-size", "0"], "--vocab-size is 0"),
        (["--seq-len", "8"], "takes images: leave --seq-len out"),
        (["--model", "rev-gpt", "--image", "3x8x8"], "takes text: leave --image out"),
        (["--out", __file__], "which is a file"),
    ],
)
def test_what_is_refused_before_anything_is_counted(options, message, tmp_path, capsys):
    assert main(["memory", *SMALL, "--out", str(tmp_path / "no"), *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "…" not in said
    assert not (tmp_path / "no").exists()
