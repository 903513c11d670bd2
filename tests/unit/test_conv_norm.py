"""Convolutions that skip their bias before a batch norm, compared with convolutions that add it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from petra import models
from petra.kernels import conv_norm

NETWORKS = {
    "revnet18": {"width": 4},
    "revnet50": {"width": 2, "depths": (1, 2)},
    "resnet18": {"width": 4, "depths": (1, 1)},
    "revnet34": {"width": 2, "depths": (1, 1), "stem": "imagenet"},
}


def plain(conv, norm, x, relu=None, added=None):
    x = norm(conv(x)) if added is None else added + norm(conv(x))
    return x if relu is None else relu(x)


def with_biases(name):
    torch.manual_seed(0)
    network = models.create(name, **NETWORKS[name]).double()
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    for conv in convolutions:
        nn.init.normal_(conv.bias)
    return network, convolutions


def train(network, steps=3):
    for seed in range(steps):
        x = torch.randn(6, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        network.zero_grad()
        outputs = network(x)
        outputs.square().sum().backward()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.sub_(parameter.grad, alpha=1e-3)
    return outputs.detach(), x


@pytest.mark.parametrize("name", NETWORKS)
def test_same_as_with_the_bias(name, monkeypatch):
    network, convolutions = with_biases(name)
    reference = copy.deepcopy(network)
    outputs, x = train(network)
    assert all((conv.bias.grad == 0).all() for conv in convolutions)
    with monkeypatch.context() as patch:
        patch.setattr("petra.models.convolution.conv_norm_relu", plain)
        patch.setattr(conv_norm, "conv_norm_relu", plain)
        expected, _ = train(reference)
        assert any((p.grad != 0).any() for n, p in reference.named_parameters() if n.endswith("conv1.bias"))
        torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(network.state_dict(), reference.state_dict(), rtol=1e-9, atol=1e-9)
        expected = reference.eval()(x)
    torch.testing.assert_close(network.eval()(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("momentum", [None, 1.0, 0.5, 0.0])
def test_running_mean(momentum):
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(2, 3, 1).double(), nn.BatchNorm2d(3, momentum=momentum).double()
    twin = copy.deepcopy(norm)
    for _ in range(3):
        x = torch.randn(5, 2, 4, 4, dtype=torch.float64)
        torch.testing.assert_close(conv_norm.conv_norm_relu(conv, norm, x), twin(conv(x)))
    torch.testing.assert_close(norm.state_dict(), twin.state_dict())


def test_a_frozen_bias_has_no_gradient():
    conv, norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)
    conv.bias.requires_grad_(False)
    conv_norm.conv_norm_relu(conv, norm, torch.randn(4, 2, 3, 3)).sum().backward()
    assert conv.bias.grad is None
    assert conv.weight.grad is not None


def test_two_graphs_at_the_same_time():
    conv, norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)
    graphs = [conv_norm.conv_norm_relu(conv, norm, torch.randn(4, 2, 3, 3)).square().sum() for _ in range(2)]
    for outputs in graphs:
        outputs.backward()


class Standardised(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


class Frozen(nn.BatchNorm2d):
    def forward(self, x):
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


@pytest.mark.parametrize(("conv", "norm"), [(Standardised, nn.BatchNorm2d), (nn.Conv2d, Frozen)])
def test_classes_that_do_something_else_are_called(conv, norm):
    torch.manual_seed(0)
    layers = conv_norm.ConvNorm(conv(3, 4, 3), norm(4))
    twin = nn.Sequential(*copy.deepcopy(layers))
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(layers(x), twin(x))
    torch.testing.assert_close(layers[1].running_mean, twin[1].running_mean)


def test_hooks_of_convolutions_run():
    torch.manual_seed(0)
    layers = conv_norm.ConvNorm(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    prune.random_unstructured(layers[0], "weight", 0.5)  # computes the weight before every call
    seen = []
    layers[0].register_forward_hook(lambda *_: seen.append(1))
    for _ in range(2):
        layers(torch.randn(2, 3, 5, 5)).square().sum().backward()
    assert len(seen) == 2
    assert layers[0].weight_orig.grad is not None
