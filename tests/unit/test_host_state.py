"""Copies of a state in host memory."""

from collections import OrderedDict

import torch
from helpers.networks import batches, mixed_network
from helpers.trainers import make

from petra.pipeline.host_state import HostBuffers, copy_to_host


def test_the_copy_shares_nothing_with_the_state():
    weight = torch.arange(6.0).requires_grad_()
    state = {"weights": OrderedDict(w=weight, again=weight.detach()), "plain": [1, {"a": [2]}, (weight.detach()[:2],)]}
    state["odd"] = {torch.float32: torch.eye(3).to_sparse(), "empty": torch.empty(0, 3), "count": torch.tensor(3)}
    copied = copy_to_host(state, HostBuffers()).state
    state["plain"][1]["a"].append(3)
    state["odd"]["count"].add_(1)
    with torch.no_grad():
        weight.zero_()
    assert type(copied["weights"]) is OrderedDict
    assert copied["plain"][:2] == [1, {"a": [2]}]
    assert torch.equal(copied["weights"]["w"], torch.arange(6.0))
    assert not copied["weights"]["w"].requires_grad
    assert copied["weights"]["again"] is copied["weights"]["w"]  # they are written once
    assert torch.equal(copied["plain"][2][0], torch.arange(2.0))
    assert torch.equal(copied["odd"][torch.float32].to_dense(), torch.eye(3))
    assert copied["odd"]["empty"].shape == (0, 3)
    assert copied["odd"]["count"] == 3


def test_memory_is_reused_and_not_hoarded():
    buffers, first, second = HostBuffers(), torch.randn(4, 3), torch.randn(2, 3, 4, 4)
    one = copy_to_host([first, second], buffers).state
    other = copy_to_host([first + 1, second], buffers).state
    assert [x.data_ptr() for x in one] == [x.data_ptr() for x in other]
    assert torch.equal(other[0], first + 1)
    copy_to_host([second], buffers)
    assert buffers.size == second.nbytes
    back = copy_to_host([first, second], buffers).state
    assert back[1].data_ptr() == one[1].data_ptr()


def test_layouts_are_those_of_a_clone():
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for tensor in (images, images[:, 1:], torch.randn(3, 1).expand(3, 5), torch.randn(4, 3).t()):
        copied = copy_to_host(tensor, HostBuffers()).state
        assert torch.equal(copied, tensor)
        assert copied.stride() == tensor.clone().stride()


def test_a_trainer_continues_from_a_copy_while_the_original_trains_on():
    trainer, data, buffers = make(mixed_network(), stages=4), list(batches(14)), HostBuffers()
    for tick, (x, y) in enumerate(data):
        trainer.step(x, y)
        if tick in (3, 8):
            copied = copy_to_host(trainer.state_dict(), buffers)
    trainer.drain()
    resumed = make(mixed_network(), stages=4)
    copied.wait()
    resumed.load_state_dict(copied.state)
    for x, y in data[9:]:
        resumed.step(x, y)
    resumed.drain()
    expected = trainer.network.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.network.state_dict().items())
