"""Conversion that starts from the function that the network had."""

import copy

import pytest
import torch
from helpers.library_blocks import Own, split
from helpers.library_networks import IDS, IMAGES, KEEP, outputs_of, timm_network, transformer, without_dropout
from torch import nn
from torch.nn.functional import cross_entropy

import petra
from petra import make_reversible, plain_autograd
from petra.conversion.blended import check_blend, default_blend


def encoder(depth=4, norm_first=True, dropout=0.2):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True, norm_first=norm_first)
    network = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.4)
    return network


X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


class Chain(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x, gain=None):
        for block in self.blocks:
            x = block(x, gain=gain)
        return x


def gradients(network, x):
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = network(x)
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
    return [y.detach(), *torch.autograd.grad(loss, [x, *network.parameters()])]


class TestFunction:
    @pytest.mark.parametrize("norm_first", [True, False])
    def test_evaluation_is_the_original_function(self, norm_first):
        network = encoder(norm_first=norm_first).eval()
        converted = make_reversible(network, coupling="bdia")
        torch.testing.assert_close(converted(X), network(X), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(make_reversible(network)(X), network(X), atol=1e-2)
        expected, found = gradients(network, X), gradients(converted, X)  # stored, because it is not invertible
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    def test_networks_of_libraries(self):
        for network, inputs in (
            (transformer("LlamaForCausalLM"), (IDS,)),
            (transformer("BertForSequenceClassification"), (IDS, KEEP)),
            (timm_network("convnext_tiny"), (IMAGES,)),
        ):
            network.eval()
            converted = make_reversible(network, coupling="bdia")
            torch.testing.assert_close(outputs_of(converted, *inputs), outputs_of(network, *inputs))
            views = petra.as_network(converted)
            assert torch.equal(views.eval()(*inputs), outputs_of(converted, *inputs))

    @pytest.mark.parametrize("coupling", ["bdia", "midpoint"])
    @pytest.mark.parametrize("norm_first", [True, False])
    def test_the_recurrence(self, coupling, norm_first):
        network = encoder(3, norm_first, dropout=0.0).double()
        converted = make_reversible(network, coupling=coupling, blend=0.5)
        x = X.double()
        torch.manual_seed(3)
        found = converted(x)
        torch.manual_seed(3)
        states = [x, network.layers[0](x)]
        for block in network.layers[1:]:
            gamma = 0.5
            if coupling == "bdia":
                gamma = 0.5 * (torch.randint(0, 2, (3, 1, 1)) * 2 - 1)
            before, now = states[-2:]
            h = block(now)
            if norm_first:
                states.append(gamma * before + (1 - gamma) * now + (1 + gamma) * (h - now))
            else:
                states.append(gamma * before + (1 - gamma) * h)
        torch.testing.assert_close(found, states[-1], rtol=1e-12, atol=1e-12)

    def test_own_blocks(self):
        network = Chain(Own() for _ in range(3)).double().eval()
        converted = make_reversible(network, split, coupling="bdia")
        x = torch.randn(2, 4, dtype=torch.float64)
        torch.testing.assert_close(converted(x, gain=torch.tensor(0.5)), network(x, gain=0.5))


class TestGradients:
    @pytest.mark.parametrize("coupling", ["bdia", "midpoint"])
    @pytest.mark.parametrize("norm_first", [True, False])
    @pytest.mark.parametrize("depth", [4, 16])
    def test_reversible_equals_plain(self, coupling, norm_first, depth):
        tolerance = 1e-5 if depth == 4 else 1e-3  # 30 bits are lost
        network = make_reversible(encoder(depth, norm_first), coupling=coupling)
        found = gradients(network, X)
        with plain_autograd():
            expected = gradients(network, X)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(b.abs().max()))

    def test_blend_is_shared_and_checked(self):
        network = make_reversible(encoder(), coupling="midpoint", blend=0.25)
        before = network(X)
        petra.set_blend(network, 1.0)
        assert not torch.allclose(network(X), before)
        with pytest.raises(ValueError, match=r"blend is 0: give a number above 0"):
            petra.set_blend(network, 0)
        with pytest.raises(ValueError, match=r"TransformerEncoder has no blend: convert it with make_reversible"):
            petra.set_blend(make_reversible(encoder()), 0.5)

    def test_limits(self):
        assert [default_blend(n) for n in (1, 16, 17, 31, 32, 44, 45, 94, 200)] == [
            *(0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 0.875, 0.875, 1.0)
        ]
        with pytest.raises(ValueError, match=r"blend is 0.2, but .* 12 blocks would lose 26 bits .* 18 .*: give 0.25"):
            check_blend(0.2, 12)
        with pytest.raises(ValueError, match=r"coupling is 'momentum': give one of additive, bdia, midpoint"):
            make_reversible(encoder(), coupling="momentum")
        with pytest.raises(ValueError, match=r"blend is 0.01, but reconstruction"):
            make_reversible(encoder(), coupling="midpoint", blend=0.01)


def logits_loss(outputs, targets):
    outputs = outputs.logits if hasattr(outputs, "logits") else outputs
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


class TestStages:
    def test_midpoint_equals_a_loop(self):
        module = make_reversible(without_dropout(transformer("LlamaForCausalLM")), coupling="midpoint").train()
        plain = copy.deepcopy(module)
        trainer = petra.Trainer(
            module, method="reversible", stages=4, loss=logits_loss, optimizer=lambda p: torch.optim.SGD(p, 0.05)
        )
        optimizer = torch.optim.SGD(plain.parameters(), 0.05)
        for _ in range(3):
            trainer.step(IDS, IDS)
            optimizer.zero_grad()
            logits_loss(plain(input_ids=IDS), IDS).backward()
            optimizer.step()
        for a, b in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)

    def test_random_signs_are_those_of_the_forward(self):
        modules = [make_reversible(transformer("LlamaForCausalLM"), coupling="bdia").train() for _ in range(2)]
        for module, method in zip(modules, ("reversible", "backprop"), strict=True):
            trainer = petra.Trainer(
                module, method=method, stages=3, loss=logits_loss, optimizer=lambda p: torch.optim.SGD(p, 0.05)
            )
            for _ in range(3):
                trainer.step(IDS, IDS)
        for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

    def test_evaluation_mode_is_not_trained(self):
        module = make_reversible(transformer("LlamaForCausalLM"), coupling="bdia").train()
        module.model.layers.eval()
        trainer = petra.Trainer(
            module, method="reversible", stages=3, loss=logits_loss, optimizer=lambda p: torch.optim.SGD(p, 0.05)
        )
        with pytest.raises(ValueError, match=r"computes its original function in evaluation mode.*: call train\(\)"):
            trainer.step(IDS, IDS)
