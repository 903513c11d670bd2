"""The description of the environment of a measurement."""

from pathlib import Path

import pytest
import torch

import petra
from petra.measure import environment
from petra.measure.environment import source_hash


def test_a_cpu_has_no_cudnn_entry():
    found = environment()
    assert (found["torch"], found["device"]) == (torch.__version__, "cpu")
    assert "cudnn_benchmark" not in found


@pytest.mark.parametrize("chosen_by_time", [False, True])
def test_a_gpu_has_a_cudnn_entry(chosen_by_time, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", chosen_by_time)
    found = environment("cuda")
    assert (found["device"], found["cudnn_benchmark"]) == ("a GPU", chosen_by_time)


def test_the_environment_identifies_the_code():
    assert environment()["source"] == source_hash(Path(petra.__file__).parent)


def test_only_the_same_code_has_the_same_hash(tmp_path):
    def written(name, **files):
        for file, text in files.items():
            path = (tmp_path / name / file.replace("__", "/")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return source_hash(tmp_path / name)

    first = written("first", a="x = 1\n", b__c="y = 2\n")
    assert written("same", b__c="y = 2\n", a="x = 1\n") == first
    (tmp_path / "same" / "a.pyc").write_bytes(b"compiled")
    assert source_hash(tmp_path / "same") == first
    others = [
        written("content", a="x = 2\n", b__c="y = 2\n"),
        written("name", a="x = 1\n", b__d="y = 2\n"),
        written("moved_file", a="x = 1\n", c="y = 2\n"),
        written("more", a="x = 1\n", b__c="y = 2\n", d=""),
        written("moved_code", a="x = 1\ny = 2\n", b__c=""),
    ]
    assert len({first, *others}) == 6
