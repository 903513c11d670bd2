"""The code of the README works when pasted."""

import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_block(number, capsys):
    torch.manual_seed(0)
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), {})
    printed = capsys.readouterr().out
    if number == 0:
        accuracy = float(re.search(r"accuracy=([\d.]+)", printed)[1])
        assert accuracy > 0.6  # ten classes, no decay of the learning rate
    else:
        assert printed.startswith("inverts: inputs come back to")


def test_the_code_on_reversible_networks_works():
    guide = (Path(__file__).parents[1] / "docs" / "reversible.md").read_text()
    block = re.search(r"```python\n(.*?)```", guide, flags=re.DOTALL)[1]
    assert "pareprop" in block
    exec(compile(block, "docs/reversible.md", "exec"), {})


def test_the_code_on_trainers_works(tmp_path, monkeypatch, capsys):
    guide = (Path(__file__).parents[1] / "docs" / "trainer.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        torch.manual_seed(0)
        exec(compile(block, "docs/trainer.md", "exec"), {})
        printed = capsys.readouterr().out
        assert "Evaluation(loss=" in printed
    assert len(blocks) == 2
    assert float(re.search(r"accuracy=([\d.]+)", printed)[1]) > 0.9  # the network of one's own has learned


def test_there_are_two_blocks_and_the_first_is_short():
    assert len(BLOCKS) == 2
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 11


def test_the_drawing_is_what_the_command_prints(capsys):
    from petra.cli.main import main

    main(["schedule", "--stages", "4", "--microbatches", "6", "--order", "lock-step"])
    drawing = capsys.readouterr().out.split("\n\n")[0]
    assert drawing.startswith("tick")
    assert drawing in re.sub(r"^    ", "", README, flags=re.MULTILINE)
