"""Tensors without memory of their own, such as 8-bit moments: copied, counted and packed by the tensors inside."""

import pytest
import torch
from torch import nn

from petra.memory.fit import allocated_bytes
from petra.pipeline.host_state import HostBuffers, copy_to_host
from petra.reversible.streams import copied, plain_parts
from petra.trainer.state import _laid_out, moved


class Quantized(torch.Tensor):
    """Codes and a scale. As in torchao, `to` copies nothing on the same device, and `clone` is missing."""

    @staticmethod
    def __new__(cls, codes, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes, scale, dtype):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner, dtype, size, stride):
        return cls(inner["codes"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func not in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            raise NotImplementedError(func)
        return cls(args[0].codes, args[0].scale, args[0].dtype)


def quantized(shape=(4, 3, 2, 2)):
    codes = torch.arange(torch.Size(shape).numel(), dtype=torch.uint8).reshape(shape)
    return Quantized(codes, torch.ones(2), torch.float32)


@pytest.mark.parametrize(
    "copy",
    [
        copied,
        lambda x: copied(x, "cpu"),
        lambda x: moved({"a": [x]}, torch.device("cpu"))["a"][0],
        lambda x: copy_to_host({"a": [x]}, HostBuffers()).state["a"][0],
    ],
    ids=["here", "there", "moved", "to host memory"],
)
def test_copies_share_no_memory(copy):
    x = quantized()
    y = copy(x)
    assert type(y) is Quantized
    x.codes.zero_()
    x.scale.zero_()
    assert y.codes.flatten().tolist() == list(range(48))
    assert y.scale.tolist() == [1, 1]
    assert (y.codes.dtype, y.dtype, y.shape) == (torch.uint8, torch.float32, x.shape)


def test_plain_tensors_are_copied_as_before():
    x = torch.ones(2, 3)
    for y in (copied(x), copied(x, "cpu"), copied(x, "meta")):
        assert (type(y), y.shape) == (torch.Tensor, x.shape)
        assert y.is_meta or y.data_ptr() != x.data_ptr()
    assert plain_parts(x)[0] is x


def test_bytes_are_those_of_the_parts():
    x = quantized()
    assert [part.nbytes for part in plain_parts(x)] == [48, 8]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"] = x
    network = nn.Sequential(nn.Linear(2, 2))
    assert allocated_bytes(network, [optimizer]) == allocated_bytes(network, []) + 56


def test_they_keep_their_layout_when_they_are_loaded():
    x = quantized()
    parameter = torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    assert _laid_out({"exp_avg": x}, parameter)["exp_avg"] is x
