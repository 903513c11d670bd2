"""The optimizers of runs: fused on a GPU, and there alone; with Nesterov's momentum or without."""

import pytest
import torch
from torch import nn

from petra.runs.config import RunConfig
from petra.trainer import optimizers


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
    assert found == ([None, None] if name == "nadamw" else [True, True])  # it needs no fused version


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_looks_ahead_unless_it_is_told_not_to(momentum, nesterov):
    config = RunConfig(model="revnet18", data="digits", momentum=momentum, nesterov=nesterov)
    groups = config.make_optimizer([nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]).param_groups
    assert [group["nesterov"] for group in groups] == 2 * [nesterov and momentum > 0]
