"""Several optimizers in a stage, and the names that optimizer functions get."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import petra
from petra.optim import CombinedOptimizer


def make_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def two(parameters):
    matrices = [p for p in parameters if p.ndim == 2]
    vectors = [p for p in parameters if p.ndim < 2]
    return [torch.optim.AdamW(matrices, 0.01), torch.optim.SGD(vectors, 0.1, momentum=0.9)]


def batches(count=12):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 5, generator=generator), torch.arange(4) % 3) for _ in range(count)]


def make_trainer(stages=3, optimizer=two, **options):
    options = {"scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)} | options
    return petra.Trainer(make_network(), loss=cross_entropy, stages=stages, optimizer=optimizer, **options)


def test_two_optimizers_train_as_they_would_alone():
    trainer, network = make_trainer(1, method="backprop"), make_network()
    optimizers = two(list(network.parameters()))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
    for x, y in batches():
        trainer.step(x, y)
        network.zero_grad()
        cross_entropy(network(x), y).backward()
        for part in (*optimizers, *schedulers):
            part.step()
    assert all(torch.equal(a, b) for a, b in zip(trainer.network.parameters(), network.parameters(), strict=True))
    assert trainer.learning_rates() == {0: [o.param_groups[0]["lr"] for o in optimizers]}


@pytest.mark.parametrize("stages", [3, 2, 1])
def test_they_resume_at_any_cut(stages):
    whole, first = make_trainer(stages, method="backprop"), make_trainer(method="backprop")
    for x, y in batches():
        whole.step(x, y)
    for x, y in batches()[:5]:
        first.step(x, y)
    first.drain()
    again = make_trainer(stages, method="backprop")
    again.load_drained(first.state_dict())
    for x, y in batches()[5:]:
        again.step(x, y)
    for a, b in zip(whole.network.parameters(), again.network.parameters(), strict=True):
        assert torch.equal(a, b)


def test_states_with_micro_batches_in_flight_are_restored():
    whole, first, again = make_trainer(), make_trainer(), make_trainer()
    for x, y in batches():
        whole.step(x, y)
    for x, y in batches()[:7]:
        first.step(x, y)
    again.load_state_dict(first.state_dict())
    for x, y in batches()[7:]:
        again.step(x, y)
    for a, b in zip(whole.network.parameters(), again.network.parameters(), strict=True):
        assert torch.equal(a, b)


def test_names_are_those_of_the_network():
    found = {}

    def with_pairs(named_parameters):
        found["pairs"] = [name for name, _ in named_parameters]
        return torch.optim.SGD(named_parameters, 0.1)

    def with_keyword(parameters, *, named_parameters):
        found["keyword"] = [name for name, _ in named_parameters]
        return torch.optim.SGD(parameters, 0.1)

    def with_second(parameters, names):
        found["second"] = list(names)
        return torch.optim.SGD(parameters, 0.1)

    def plain(parameters, lr=0.1):
        return torch.optim.SGD(parameters, lr)

    for factory in (with_pairs, with_keyword, with_second, plain):
        trainer = make_trainer(optimizer=factory, stages=[3, 2])
        trainer.step(*batches()[0])
        again = make_trainer(optimizer=factory, stages=[3, 2])
        again.load_state_dict(trainer.state_dict())
    assert set(map(tuple, found.values())) == {("4.weight", "4.bias")}  # of the last stage
    assert len(found) == 3


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="is in two optimizers"):
        make_trainer(optimizer=lambda p: [torch.optim.SGD(p, 0.1), torch.optim.SGD(p, 0.1)])
    with pytest.raises(ValueError, match="predict corrects the step of one optimizer, but a stage has 2"):
        make_trainer(corrections=["predict"])
    with pytest.raises(ValueError, match="LBFGS evaluates the loss several times"):
        make_trainer(optimizer=lambda p: [torch.optim.LBFGS(p[:1]), torch.optim.SGD(p[1:], 0.1)])
    combined = CombinedOptimizer(two(list(make_network().parameters())))
    with pytest.raises(ValueError, match="the state has 1 parameter groups, but there are 2"):
        combined.load_state_dict(torch.optim.SGD(make_network().parameters(), 0.1).state_dict())
    with pytest.raises(ValueError, match="takes no further groups"):
        combined.add_param_group({"params": []})


def test_a_closure_is_called_once():
    combined = CombinedOptimizer(two(list(make_network().parameters())))
    calls = []
    assert combined.step(lambda: calls.append(1) or 3.0) == 3.0
    assert calls == [1]
