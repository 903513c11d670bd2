"""Exports: safetensors, distributed checkpoints, torch.export and ONNX."""

import warnings

import pytest
import torch
from helpers.libraries import library
from safetensors.torch import load_file
from torch import nn

import petra
from petra.integrations import export_onnx, export_program, save_distributed, save_safetensors

SMALL = {
    "revnet18": {"in_channels": 1, "num_classes": 4, "width": 4, "depths": (1, 1)},
    "rev-vit-s": {"image_size": 8, "patch": 4, "depth": 1, "width": 8, "heads": 2, "num_classes": 4, "in_channels": 1},
    "rev-swin-t": {
        "image_size": 16, "patch": 4, "width": 4, "depths": (1, 2), "heads": (1, 2), "window": 2, "in_channels": 1,
        "num_classes": 4,
    },
    "rev-gpt": {"vocab_size": 30, "seq_len": 8, "depth": 1, "width": 8, "heads": 2},
}  # fmt: skip


def make(name):
    torch.manual_seed(0)
    network = petra.models.create(name, **SMALL[name])
    if name == "rev-gpt":
        return network, torch.randint(30, (3, 8))
    return network, torch.randn(3, 1, SMALL[name].get("image_size", 8), SMALL[name].get("image_size", 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rev-vit-s", "rev-swin-t", "rev-gpt"])
def test_programs(name, tmp_path):
    network, x = make(name)
    before = {n: v.clone() for n, v in network.state_dict().items()}
    program = export_program(network, x)
    assert network.training
    assert all(torch.equal(v, before[n]) for n, v in network.state_dict().items())
    torch.export.save(program, tmp_path / "network.pt2")
    again = torch.export.load(tmp_path / "network.pt2").module()
    five = torch.cat([x, x[:2]])
    with torch.no_grad():
        assert torch.equal(again(five), network.eval()(five))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["revnet18", "rev-gpt"])
def test_onnx(name, tmp_path):
    onnx = library("onnx")
    library("onnxscript")
    network, x = make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        export_onnx(network, x, path=tmp_path / "network.onnx")
    found = onnx.load(tmp_path / "network.onnx").graph
    assert [i.name for i in found.input] == ["input"]
    assert found.input[0].type.tensor_type.shape.dim[0].dim_param


def test_other_outputs_are_an_error():
    class Draws(nn.Module):
        def forward(self, x):
            return x * torch.rand(())

    with pytest.raises(ValueError, match=r"outputs of the program differ from those of the network by .*"):
        export_program(Draws(), torch.ones(2, 3))


def test_an_example_has_two_samples():
    network, x = make("revnet18")
    with pytest.raises(ValueError, match=r"example has shape \(1, 1, 8, 8\): give two samples"):
        export_program(network, x[:1])
    with pytest.raises(ValueError, match="no example"):
        export_program(network)


def test_safetensors(tmp_path):
    network, _ = make("revnet18")
    save_safetensors(network, tmp_path / "weights.safetensors", {"model": "revnet18"})
    found = load_file(tmp_path / "weights.safetensors")
    assert found.keys() == network.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in network.state_dict().items())


def test_distributed_checkpoint(tmp_path):
    import torch.distributed.checkpoint as dcp

    network, x = make("revnet18")
    trainer = petra.Trainer(
        network, stages=3, loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, 0.1)
    )
    for _ in range(4):
        trainer.step(x, torch.zeros(3, dtype=torch.long))
    trainer.drain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        save_distributed(trainer, tmp_path / "weights")
        other, _ = make("revnet18")
        state = other.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / "weights", no_dist=True)
    other.load_state_dict(state)
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in other.state_dict().items())


def test_extra_state_is_an_error(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return "text"

        def set_extra_state(self, state):
            pass

    with pytest.raises(ValueError, match=r"0\._extra_state is extra state"):
        save_safetensors(petra.Network(Extra(2, 2)), tmp_path / "file")
