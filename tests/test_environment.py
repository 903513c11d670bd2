"""What is said of where a figure was measured."""

import pytest
import torch

from petra.measure import environment


def test_a_cpu_has_no_algorithms_to_choose_by_time():
    found = environment()
    assert (found["torch"], found["device"]) == (torch.__version__, "cpu")
    assert "cudnn_benchmark" not in found


@pytest.mark.parametrize("chosen_by_time", [False, True])
def test_a_gpu_says_whether_algorithms_are_chosen_by_time(chosen_by_time, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", chosen_by_time)
    found = environment("cuda")
    assert (found["device"], found["cudnn_benchmark"]) == ("a GPU", chosen_by_time)
