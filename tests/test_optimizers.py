"""The optimizers of runs: fused on a GPU, and there alone."""

import pytest
import torch
from torch import nn

from petra.training import optimizers


class OnGpu(nn.Parameter):
    """Says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("name", ["sgd", "adamw", "nadamw"])
def test_fused_where_all_parameters_are_on_a_gpu(name):
    make = getattr(optimizers, name)
    here, there = nn.Parameter(torch.zeros(2, 2)), OnGpu(torch.zeros(3))
    assert not any(group.get("fused") for group in make([here], lr=0.1).param_groups)
    assert not any(group.get("fused") for group in make([here, there], lr=0.1).param_groups)
    found = [group.get("fused") for group in make([there, OnGpu(torch.zeros(2, 2))], lr=0.1).param_groups]
    assert found == ([None, None] if name == "nadamw" else [True, True])
