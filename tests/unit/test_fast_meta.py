"""Fast operations on the meta device make the outputs that PyTorch's own make."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from petra.pipeline import fast_meta
from petra.pipeline.fast_meta import FastMetaOperations


def described(value):
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device, value.stride(), value.untyped_storage().nbytes()
    return [described(item) for item in value] if isinstance(value, tuple | list) else value


class Record(TorchDispatchMode):
    """What every operation returns."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.outputs.append((str(func), described(found)))
        return found


def run(module, shape, dtype, layout):
    with torch.device("meta"):
        module = copy.deepcopy(module).to("meta", dtype)
        x = torch.empty(shape, dtype=dtype).to(memory_format=layout).requires_grad_()
        with Record() as record:
            y = module(x)
            y = y + torch.relu(y - x) * y + 1 - y * torch.empty(shape[1:], dtype=dtype)
            torch.add(y, x, alpha=2).transpose(0, -1).relu().mul(x.transpose(0, -1)).sum().backward()
    return record.outputs, [described(t.grad) for t in (x, *module.parameters()) if t.grad is not None]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm2d(3),
        nn.BatchNorm2d(3).eval(),
        nn.BatchNorm2d(3, affine=False),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.BatchNorm2d(3, momentum=0.5).requires_grad_(False),
    ],
    ids=str,
)
def test_outputs_are_those_of_pytorch(module, dtype, layout):
    expected = run(module, (2, 3, 5, 4), dtype, layout)
    with FastMetaOperations():
        found = run(module, (2, 3, 5, 4), dtype, layout)
    assert found == expected
    assert {"aten.native_batch_norm.default", "aten.relu.default"} <= {name for name, _ in found[0]}


def test_only_tensors_without_values_are_concerned(monkeypatch):
    x = torch.randn(4, 3)
    norm = nn.BatchNorm1d(3)
    with FastMetaOperations():
        assert torch.equal(torch.relu(x), x.clamp(min=0))
        assert norm(x).abs().max() > 0
    made = []
    usual = fast_meta._KNOWN[torch.ops.aten.native_batch_norm.default]
    monkeypatch.setitem(
        fast_meta._KNOWN, torch.ops.aten.native_batch_norm.default, lambda *a: made.append(usual(*a)) or made[-1]
    )
    with FastMetaOperations():
        norm.to("meta")(x.to("meta"))
    assert made[0] is not None  # the fast way is the one that is taken
