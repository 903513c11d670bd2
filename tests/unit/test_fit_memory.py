"""The fastest training step for a given amount of memory."""

import copy
import json

import pytest
import torch
from helpers.networks import mixed_network
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import petra
from petra.memory import PlanSearch, StepCost, allocated_bytes, fit, step_cost
from petra.memory.plan_cache import cache_folder
from petra.memory.step_cost import cpu_peak
from petra.reversible.storage import storage_of

MIB = 2**20


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("petra.memory.step_cost._SECONDS", 0.0)  # one measurement is enough


class Split(nn.Module):
    def forward(self, x):
        return x * 1, x * 2


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x, y):
        return self.linear(x + y)


def residual():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def perceptron(blocks=3):
    torch.manual_seed(0)
    return petra.Network(Split(), *(petra.ReversibleBlock(residual(), residual()) for _ in range(blocks)), Join())


class Training:
    def __init__(self, network, samples=500):
        self.network = network
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        self.x, self.y = torch.randn(samples, 16), torch.randint(4, (samples,))
        self.steps = 0

    def step(self, parts=1):
        self.steps += 1
        for x, y in zip(self.x.chunk(parts), self.y.chunk(parts), strict=True):
            (cross_entropy(self.network(x), y) / parts).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fit(self, limit, **options):
        return petra.fit_memory(self.network, limit, self.step, optimizer=self.optimizer, quiet=True, **options)


def test_the_peak_is_under_the_limit_and_what_the_allocator_says():
    training = Training(perceptron())
    everything = training.fit("1 GiB")
    assert everything.cost.peak == max(plan.cost.peak for plan in everything.measured)  # nothing was too large
    least = min(plan.cost.peak for plan in everything.measured)
    for share in (0.0, 0.4):
        limit = int(least + share * (everything.cost.peak - least))
        plan = training.fit(limit, max_parts=1)
        assert plan.cost.peak <= limit
        assert [storage_of(layer) or "store" for layer in training.network] == list(plan.storages)
        training.step()  # makes the momentum
        found = allocated_bytes(training.network, [training.optimizer]) + cpu_peak(training.step)
        assert found == pytest.approx(plan.cost.peak, rel=0.01)


def test_what_does_not_fit_says_what_would():
    training = Training(perceptron())
    before = [storage_of(layer) for layer in training.network]
    with pytest.raises(petra.DoesNotFit, match=r"no training step fits into 512\.0 KiB: the smallest needs") as caught:
        petra.fit_memory(training.network, MIB // 2, lambda: training.step(), optimizer=training.optimizer, quiet=True)
    assert "or let the step take a number of parts" in str(caught.value)
    assert [storage_of(layer) for layer in training.network] == before
    assert not list(cache_folder().glob("*"))
    # With more parts, it fits.
    assert training.fit(MIB // 2).parts > 1


def test_nothing_else_changes():
    training = Training(mixed_network(classes=4), samples=4)
    training.x = torch.randn(4, 2, 4, 4)
    training.step()
    network, optimizer = copy.deepcopy(training.network.state_dict()), copy.deepcopy(training.optimizer.state_dict())
    gradient = training.network[5].fc.weight.grad = torch.ones_like(training.network[5].fc.weight)
    random = torch.get_rng_state()
    training.fit("1 GiB")
    torch.testing.assert_close(training.network.state_dict(), network, rtol=0, atol=0)
    torch.testing.assert_close(training.optimizer.state_dict(), optimizer, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert training.network[5].fc.weight.grad is gradient
    assert training.network[0].body[0].weight.grad is None


def test_an_error_of_the_step_leaves_the_network_as_it_was():
    network = perceptron().use_storage("selective")

    def step(parts):
        network(torch.randn(2, 16)).sum().backward()
        raise KeyError("no batch")

    with pytest.raises(KeyError, match="no batch"):
        petra.fit_memory(network, "1 GiB", step, quiet=True)
    assert {storage_of(layer) for layer in network} == {None, "selective"}
    assert all(p.grad is None for p in network.parameters())


def test_a_plan_is_used_again():
    training = Training(perceptron())
    first = training.fit("1 GiB")
    steps, training.steps = training.steps, 0
    second = training.fit("1 GiB")
    assert training.steps < steps / 2
    assert (second.storages, second.parts, second.measured) == (first.storages, first.parts, ())
    assert str(second).endswith("(measured earlier)")
    assert len(list(cache_folder().glob("*.json"))) == 1
    training.fit("1 GiB", cache=False)
    training.fit("2 GiB")
    training.x, training.y = training.x[:100], training.y[:100]  # another batch is another plan
    training.fit("2 GiB")
    assert len(list(cache_folder().glob("*.json"))) == 3


@pytest.mark.parametrize("content", ["", "{}", '{"storages": ["store"], "parts": 1, "seconds": 1, "peak": 1}', "[1]"])
def test_a_damaged_plan_is_made_again(content):
    training = Training(perceptron(), samples=20)
    training.fit("1 GiB")
    (file,) = cache_folder().glob("*.json")
    file.write_text(content)
    plan = training.fit("1 GiB")
    assert plan.measured
    assert json.loads(file.read_text())["parts"] == plan.parts


def test_only_networks_of_petra():
    with pytest.raises(ValueError, match=r"needs a petra\.Network, not a Linear: use petra\.as_network"):
        petra.fit_memory(nn.Linear(2, 2), "1 GiB", lambda: None)


# The search, with costs that are computed instead of measured.

COST = st.tuples(st.integers(1, 50), st.integers(-5, 50))


class Costs:
    """A step whose memory and time are sums over the layers; with more parts, it needs less memory and more time."""

    def __init__(self, network, costs):
        self.network, self.costs, self.parts = network, costs, 1

    def of(self, storages, parts=1):
        chosen = [self.costs.get(storage, (0, 0)) for storage in storages[1:-1]]
        return StepCost(
            1000 * (0.9 + 0.1 * parts) - sum(s for _, s in chosen),
            100 + 1000 // parts + sum(b for b, _ in chosen) // parts,
        )

    def measure(self, step, device, allocated, capture=False):
        step()
        return self.of([storage_of(layer) or "store" for layer in self.network], self.parts)

    def step(self, parts):
        self.parts = parts


def search(costs, limit, max_parts=1):
    found = PlanSearch(
        costs.network,
        limit,
        costs.step,
        torch.device("cpu"),
        allocated=lambda: 0,
        storages=("selective", "store"),
        max_parts=max_parts,
        quiet=True,
    )
    return found.run(cache=False)


@given(COST, COST, st.integers(0, 400))
@settings(max_examples=50)
def test_the_search_finds_the_best_mixture(selective, store, more):
    """Within the gap between the largest number of upgrades that fits and all that fit in any order."""
    network = perceptron(6)
    costs = Costs(network, {"selective": selective, "store": store})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "measure_step", costs.measure)
        patch.setattr(fit, "_CLOSE", 0.0)
        plan = search(costs, 1100 + more)
    assert plan.cost.peak <= 1100 + more
    # Every mixture with so many layers of each.
    every = [
        costs.of(["store", *["selective"] * a, *["store"] * b, *["reconstruct"] * (6 - a - b), "store"])
        for a in range(7)
        for b in range(7 - a)
    ]
    best = min(cost.seconds for cost in every if cost.peak <= 1100 + more)
    largest = max(seconds for _, seconds in (selective, store, (0, 0)))
    assert plan.cost.seconds <= best + largest


@pytest.mark.parametrize(("limit", "parts"), [(1400, 1), (1100, 1), (1099, 2), (600, 2), (599, 4)])
def test_the_batch_is_split_when_nothing_else_fits(limit, parts, monkeypatch):
    costs = Costs(perceptron(3), {"selective": (50, 10), "store": (100, 20)})
    monkeypatch.setattr(fit, "measure_step", costs.measure)
    plan = search(costs, limit, max_parts=8)
    assert plan.parts == parts
    assert plan.cost.peak <= limit


def test_steps_that_exceed_the_device_are_avoided(monkeypatch):
    costs = Costs(perceptron(4), {"selective": (50, 10), "store": (100, 20)})

    def measure(*arguments):
        found = costs.measure(*arguments)
        return found if found.peak <= 1250 else None

    monkeypatch.setattr(fit, "measure_step", measure)
    plan = search(costs, 5000)
    assert (plan.cost.peak, plan.parts) == (1250, 1) or plan.cost.peak == 1200
    assert "out of memory" in str(plan)


def test_a_step_that_cannot_be_captured_is_timed_as_it_is_with_a_warning(monkeypatch):
    class Failing:
        def __init__(self, device):
            pass

        def capture(self, work):
            raise RuntimeError("not allowed in a capture\nmore")

    monkeypatch.setattr(step_cost, "CudaGraphCapture", Failing)
    step = object()
    with pytest.warns(UserWarning, match=r"timed as it is, because it cannot be captured \(not allowed in a capture\)"):
        assert step_cost._captured(step, torch.device("cpu")) is step
