"""Each correction is what its formula says, in every pipelined method; where nothing is stale, it is nothing."""

import copy

import pytest
import torch
from helpers.delayed_reference import data, network, train
from helpers.networks import batches, mixed_network
from helpers.trainers import make, same_weights, trained
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from petra.corrections import (
    CORRECTIONS,
    Coast,
    Correction,
    Predict,
    Reschedule,
    Shrink,
    StageContext,
    StageCorrections,
    choose,
    find,
)
from petra.optim import SOAP, Muon, NAdamW, hidden_matrices, muon_groups
from petra.schedule import AsyncSchedule, Kind, ScheduleTable, lock_step, low_staleness

pytestmark = pytest.mark.slow

SETS = {
    "none": [],
    "predict": ["predict"],
    "predict further": ["predict:2"],
    "predict less far, and spike": ["predict:0.5", "spike"],
    "coast": ["coast"],
    "spike": ["spike"],
    "inertia": ["inertia:8"],
    "shrink": ["shrink:0.7"],
    "reschedule": ["reschedule:4"],
    "damp": ["damp:3"],
    "damp and predict": ["damp", "predict"],
    "discrepancy": ["discrepancy:0.3"],
    "predict and spike": ["predict", "spike"],
    "coast, inertia and spike": ["coast", "inertia:2", "spike"],
    "predict, inertia and reschedule": ["predict", "inertia:5", "reschedule:6"],
    "coast by a factor, and reschedule": ["coast:0.6", "reschedule:3"],
    "predict, spike, shrink and reschedule": ["predict", "spike", "shrink:0.8", "reschedule:5"],
    "spike, reschedule and discrepancy": ["spike", "reschedule:3", "discrepancy"],
}
DEFAULTS = {"discrepancy": 0.135, "damp": 4.0}
TOLERANCES = {"sgd": 1e-12, "adamw": 1e-12, "nadamw": 1e-5, "muon": 1e-10, "soap": 1e-8}
"""NAdamW keeps the product of its momenta in float32; the eigenvectors of SOAP amplify rounding errors."""
STASHING = ("delayed", "petra-stashed")


def plain(names):
    """Name -> parameter, from the text alone."""
    found = dict(name.split(":") if ":" in name else (name, DEFAULTS.get(name)) for name in names)
    return {name: value and float(value) for name, value in found.items()}


def check_against_formulas(blocks, k, schedule, runs, method, names, optimizer, nesterov=True, clip=None):
    torch.manual_seed(1)
    net = network(blocks)
    stages = blocks + 2
    in_flight = {"lock-step": lock_step, "low-staleness": low_staleness}[schedule](stages).in_flight
    hyper = {"optimizer": optimizer, "lr": 0.1, "gamma": 0.95, "decay": 0.01, "clip": clip}
    hyper |= {"momentum": 0.8, "nesterov": nesterov}
    expected = train(net, in_flight, k, runs, method, hyper, plain(names))

    hidden = hidden_matrices(net)

    def make_optimizer(p):
        adam = {"betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.01}
        match optimizer:
            case "sgd":
                return torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=nesterov, weight_decay=0.01)
            case "adamw":
                return torch.optim.AdamW(p, 0.1, **adam)
            case "nadamw":
                return NAdamW(p, 0.1, **adam)
            case "muon":
                groups = [{**group, "weight_decay": 0.01} for group in muon_groups(p, hidden)]
                return Muon(groups, 0.1, momentum=0.8, nesterov=nesterov, **adam)
            case "soap":  # sides of 3, whose matrices are regular
                return SOAP(p, 0.1, **adam, precondition_frequency=2, max_precondition_dim=3)

    trainer = make(
        net,
        method=method,
        stages=stages,
        schedule=schedule,
        accumulate=k,
        corrections=names,
        optimizer=make_optimizer,
        clip_norm=clip,
        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.95),
    )
    batches = iter(data(sum(runs)))
    for run in runs:
        for _ in range(run):
            trainer.step(*next(batches))
        trainer.drain()
    for layer, weights in zip(net, expected, strict=True):
        for found, wanted in zip(layer.parameters(), weights, strict=True):
            torch.testing.assert_close(found.detach(), wanted, rtol=TOLERANCES[optimizer], atol=TOLERANCES[optimizer])


@pytest.mark.parametrize(
    ("optimizer", "name", "method"),
    [
        (optimizer, name, ("petra", "delayed")[(i + j) % 2])
        for i, optimizer in enumerate(("nadamw", "muon", "soap"))
        for j, name in enumerate(("none", "predict", "predict further", "coast", "coast by a factor, and reschedule"))
    ],
)
def test_formulas_with_other_optimizers(optimizer, name, method):
    schedule, k = ("lock-step", 1) if method == "petra" else ("low-staleness", 2)
    check_against_formulas(2, k, schedule, [9, 6], method, SETS[name], optimizer)


@pytest.mark.parametrize(
    ("name", "method", "schedule", "k"),
    [
        (
            name,
            pair[(number // 2 + place * ("discrepancy" in name)) % 2],
            *(("lock-step", 1), ("low-staleness", 2))[(number + place) % 2],
        )
        for number, name in enumerate(SETS)
        for place, pair in enumerate(
            [("petra", "checkpointed"), ("checkpointed", "petra") if "discrepancy" in name else STASHING]
        )
    ],
)
def test_formulas(name, method, schedule, k):
    """Each set with both schedules, and with backwards at current and at stashed weights; each method with both."""
    check_against_formulas(2, k, schedule, [9, 6], method, SETS[name], "sgd")


@given(
    blocks=st.integers(0, 3),
    k=st.integers(1, 4),
    schedule=st.sampled_from(["lock-step", "low-staleness"]),
    runs=st.lists(st.integers(1, 12), min_size=1, max_size=2),
    method=st.sampled_from(["petra", "checkpointed", "delayed", "petra-stashed"]),
    name=st.sampled_from(sorted(SETS)),
    optimizer=st.sampled_from(["sgd", "adamw", "muon"]),
    nesterov=st.booleans(),
    clip=st.sampled_from([None, 0.3]),
)
def test_formulas_whatever_the_numbers(blocks, k, schedule, runs, method, name, optimizer, nesterov, clip):
    names = [n for n in SETS[name] if not (n.startswith("discrepancy") and method in STASHING)]
    names = [n for n in names if not (n.startswith(("spike", "inertia")) and optimizer != "sgd")]
    check_against_formulas(blocks, k, schedule, runs, method, names, optimizer, nesterov, clip)


class Recorded(Correction):
    """Records the delays that it is given."""

    name = "recorded"

    def __init__(self):
        self.delays = []

    def forward_weights(self, context, delay):
        self.delays.append(delay)

    def backward_weights(self, context, delay):
        self.delays.append(delay)


@given(
    in_flight=st.lists(st.integers(1, 4), max_size=5).map(
        lambda steps: [sum(steps[i:]) for i in range(len(steps) + 1)]
    ),
    k=st.integers(1, 5),
    microbatches=st.integers(1, 40),
)
def test_delays_are_those_of_the_schedule(in_flight, k, microbatches):
    """Counted action by action, whatever the order; and their mean in a full pipeline is τ = n/k."""
    schedule = AsyncSchedule(in_flight, k)
    for stage, program in enumerate(ScheduleTable.of(schedule, microbatches).programs):
        if in_flight[stage] == 0:
            continue
        updates, before, delays = 0, {}, {}
        for action in program:
            if action.kind is Kind.FORWARD:
                before[action.microbatch] = updates
            elif action.kind is Kind.BACKWARD:
                delays[action.microbatch] = updates - before[action.microbatch]
            else:
                updates += 1
        recorded = Recorded()
        parameter = nn.Parameter(torch.zeros(1))
        stage_corrections = StageCorrections(
            [recorded], [parameter], torch.optim.SGD([parameter], 0.1), in_flight[stage], k
        )
        accumulated = 0
        for action in program:
            recorded.delays.clear()
            m = action.microbatch
            if action.kind is Kind.FORWARD:
                assert stage_corrections.before_forward(m, accumulated) == (delays[m], None)
                assert recorded.delays == [delays[m]] * (delays[m] > 0)
            elif action.kind is Kind.BACKWARD:
                stage_corrections.before_backward(m)
                assert recorded.delays == [delays[m]] * (delays[m] > 0)
                accumulated += 1
            else:
                stage_corrections.step()
                accumulated = 0
        n = in_flight[stage]
        for group in range(-(-n // k), microbatches // k):  # its first forward was in a full pipeline
            assert sum(delays[group * k + i] for i in range(k)) / k == n / k == stage_corrections.context.staleness


@pytest.fixture(scope="module")
def uncorrected():
    """Stages -> a network, and the same one trained without corrections."""
    found = {}
    for stages in (1, 3):
        start = mixed_network()
        found[stages] = start, trained(copy.deepcopy(start), stages=stages)
    return found


@pytest.mark.parametrize("name", CORRECTIONS)
def test_where_nothing_is_stale_nothing_changes(name, uncorrected):
    """Bit for bit: on one stage, and on the last of several, which reads what others have corrected."""
    names = [CORRECTIONS[name].example]
    start, expected = uncorrected[1]
    assert same_weights(trained(copy.deepcopy(start), stages=1, corrections=names), expected)
    trainer = make(mixed_network(), stages=3, corrections=names)
    assert [stage.corrections is None for stage in trainer.stages] == [False, False, True]


@pytest.mark.parametrize("name", [n for n in SETS if n != "none"])
def test_where_something_is_stale_something_changes(name, uncorrected):
    start, expected = uncorrected[3]
    assert not same_weights(trained(copy.deepcopy(start), stages=3, corrections=SETS[name]), expected)


@pytest.mark.parametrize("name", ["predict", "coast", "discrepancy"])
def test_weights_come_back_to_the_bit_and_stay_where_they_are(name):
    """Many forwards and backwards between two updates, none of which leaves a trace in the weights."""
    trainer = make(mixed_network(), stages=3, accumulate=4, schedule="lock-step", corrections=[name])
    parameters = list(trainer.network.parameters())
    identities = [p.data_ptr() for p in parameters]
    seen = {}
    swapped = []

    def observe(tick, action, stage):
        now = [p.detach().clone() for p in stage.parameters]
        if action.kind is not Kind.UPDATE and stage.index in seen:
            assert all(torch.equal(a, b) for a, b in zip(now, seen[stage.index], strict=True))
        seen[stage.index] = now

    for stage in trainer.stages[:2]:
        using = stage.layers.using

        def noted(weights, using=using):
            swapped.append(weights is not None)
            return using(weights)

        stage.layers.using = noted
    trainer.executor.observers.append(observe)
    for _ in range(17):
        trainer.step(torch.randn(3, 2, 4, 4), torch.randint(4, (3,)))
    assert any(swapped)
    assert [p.data_ptr() for p in parameters] == identities


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("delay", [1, 2, 9])
def test_coasting_ends_where_momentum_leads_without_new_gradients(nesterov, delay):
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9, nesterov=nesterov)
    context = StageContext([parameter], optimizer, delay)
    for _ in range(3):
        parameter.grad = torch.randn(5, dtype=torch.float64)
        optimizer.step()
        context.updates += 1
    (guess,) = find("coast").forward_weights(context, delay)
    (further,) = find("predict").forward_weights(context, delay)
    for _ in range(delay):
        parameter.grad = torch.zeros(5, dtype=torch.float64)
        optimizer.step()
    torch.testing.assert_close(guess, parameter.detach(), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(further, guess)


@pytest.mark.parametrize("name", ["predict", "coast", "coast:0.7"])
def test_a_rate_in_the_memory_of_a_device_predicts_the_same_to_the_bit(name):
    """Recorded ticks have it there, in float32; ordinary ones have the same number on the host."""
    torch.manual_seed(0)
    for delay in range(1, 10):
        parameter = nn.Parameter(torch.randn(50))
        optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
        parameter.grad = torch.randn(50)
        optimizer.step()
        found = []
        rate = torch.rand(())
        for lr in (float(rate), rate):
            optimizer.param_groups[0]["lr"] = lr
            found += find(name).forward_weights(StageContext([parameter], optimizer, delay, updates=1), delay)
        assert found[0].equal(found[1]), delay


def test_weights_come_back_when_a_layer_fails():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.fails = nn.Linear(4, 4), False

        def forward(self, x):
            if self.fails:
                raise RuntimeError("not today")
            return self.fc(x)

    net = nn.Sequential(Moody(), nn.Linear(4, 4))
    trainer = make(net, stages=2, method="checkpointed", corrections=["predict"])
    for _ in range(4):
        trainer.step(torch.randn(3, 4), torch.randint(4, (3,)))
    before = copy.deepcopy(net.state_dict())
    net[0].fails = True
    with pytest.raises(ValueError, match="not today"):
        trainer.step(torch.randn(3, 4), torch.randint(4, (3,)))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))


def test_evaluation_uses_the_weights_themselves():
    trainer = make(mixed_network(), stages=4, schedule="lock-step", corrections=["predict", "spike"])
    x = torch.randn(3, 2, 4, 4)
    for _ in range(12):
        trainer.step(torch.randn(3, 2, 4, 4), torch.randint(4, (3,)))
    twin = copy.deepcopy(trainer.network).eval()
    with torch.no_grad():
        assert torch.equal(trainer.predict(x), twin(x))


def test_schedulers_see_the_optimizers_own_learning_rate():
    trainer = make(
        mixed_network(),
        stages=4,
        schedule="lock-step",
        corrections=["reschedule:100"],
        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    )
    for _ in range(10):
        trainer.step(torch.randn(3, 2, 4, 4), torch.randint(4, (3,)))
    stage = trainer.stages[0]
    assert stage.updates == 4
    assert stage.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5**4)
    assert stage.corrections.context.lr_factor == pytest.approx(6 ** -(1 - 4 / 100))


@pytest.mark.parametrize("name", ["predict", "coast"])
@pytest.mark.parametrize("method", ["checkpointed", "delayed"])
def test_nothing_is_predicted_of_what_has_been_frozen_since(name, method):
    net, seen = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), []
    trainer = make(net, stages=3, method=method, corrections=[name])
    net[0].register_forward_hook(lambda layer, inputs, output: seen.append(layer.weight.detach().clone()))
    for step in range(16):
        if step == 8:
            assert not all(torch.equal(weight, net[0].weight) for weight in seen[-2:])
            net[0].weight.requires_grad_(False)
        trainer.step(torch.randn(3, 4), torch.randint(4, (3,)))
    assert all(torch.equal(weight, net[0].weight) for weight in seen[-2:])


def test_predictions_follow_the_largest_average_where_adam_does():
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.AdamW([parameter], 0.1, (0.9, 0.5), weight_decay=0.0, amsgrad=True)
    for gradient in (1.0, 0.0, 0.0):
        parameter.grad = torch.full_like(parameter, gradient)
        before = parameter.item()
        optimizer.step()
    (found,) = Predict().forward_weights(StageContext([parameter], optimizer, 1.0, updates=3), 1)
    assert found.item() == pytest.approx(2 * parameter.item() - before)  # as far again as the last step went


def test_spike_follows_an_optimizer_that_maximizes():
    ends = []
    for sign in (1, -1):
        torch.manual_seed(1)
        net = network(1)
        trainer = make(
            net,
            stages=3,
            corrections=["spike"],
            loss=lambda y, target, sign=sign: sign * nn.functional.cross_entropy(y, target),
            optimizer=lambda p, sign=sign: torch.optim.SGD(p, 0.1, 0.8, weight_decay=0.01, maximize=sign < 0),
        )
        for x, y in data(6):
            trainer.step(x, y)
        trainer.drain()
        ends.append(net)
    assert same_weights(*ends)


def test_spike_gets_the_gradient_itself():
    """Without weight decay, SGD that takes all parameters at once writes Nesterov's step into their gradients."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
    found = []
    for foreach in (False, True):
        twin = copy.deepcopy(net)

        def optimizer(p, foreach=foreach):
            return torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, foreach=foreach)

        trainer = make(twin, stages=3, corrections=["spike"], optimizer=optimizer)
        for x, y in data(8):
            trainer.step(x, y)
        trainer.drain()
        assert all(group["nesterov"] for stage in trainer.stages for group in stage.optimizer.param_groups)
        found.append(twin)
    torch.testing.assert_close(found[0].state_dict(), found[1].state_dict())


@pytest.mark.parametrize("method", STASHING)
@pytest.mark.parametrize("change", ["rate", "frozen", "momentum"])
def test_a_backward_has_the_predicted_weights_of_its_forward_whatever_is_set_in_between(method, change):
    trainer = make(
        mixed_network(), method=method, stages=4, schedule="lock-step", accumulate=2, corrections=["coast", "inertia:4"]
    )
    stage, used = trainer.stages[0], {}
    parameter = next(iter(stage.layers[0].parameters()))
    forward, take = stage.forward, stage.stash.take

    def remembering(microbatch, inputs):
        handle = stage.layers[0].register_forward_pre_hook(
            lambda layer, _: used.__setitem__(microbatch, next(layer.parameters()).detach().clone())
        )
        outputs = forward(microbatch, inputs)
        handle.remove()
        return outputs

    def comparing(microbatch):
        found = take(microbatch)
        assert torch.equal((parameter if found is None else found[0]).detach(), used.pop(microbatch)), microbatch
        return found

    stage.forward, stage.stash.take = remembering, comparing
    for i in range(24):
        if i == 13 and change == "frozen":
            parameter.requires_grad_(False)
        elif i == 13:
            for group in stage.optimizer.param_groups:
                group.update({"lr": 0.001} if change == "rate" else {"momentum": 0.5})
        trainer.step(torch.randn(3, 2, 4, 4), torch.randint(4, (3,)))
    trainer.drain()


def test_a_parameter_is_the_same_however_it_is_written():
    assert str(Shrink(1)) == str(find("shrink:1")) == "shrink:1.0"
    assert (str(Reschedule(5)), str(Coast()), str(Coast(1))) == ("reschedule:5", "coast", "coast:1.0")
    with pytest.raises(ValueError, match=r"reschedule has 2\.5 updates: give an integer, 1 or more"):
        Reschedule(2.5)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_stashed_predictions_are_shared(k):
    """One for each version and delay, not one for each micro-batch in flight."""
    trainer = make(
        mixed_network(), method="delayed", stages=4, schedule="lock-step", accumulate=k, corrections=["predict"]
    )
    for _ in range(30):
        trainer.step(torch.randn(3, 2, 4, 4), torch.randint(4, (3,)))
        stage = trainer.stages[0]
        used = {id(copy) for copy in stage.stash.copies.values()}
        assert len(stage.saved) <= 6
        assert len(used) <= 2 * -(-6 // k) + 1 if k > 1 else len(used) <= 6
    trainer.drain()
    assert not any(stage.stash.copies for stage in trainer.stages)


def test_parameters_without_momentum_or_gradient():
    """Frozen ones, and ones that no gradient reaches until later."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.c.requires_grad_(False)
            self.both = False

        def forward(self, x):
            assert torch.equal(self.c.weight, frozen)  # also where others are predicted
            y = self.c(self.a(x))
            return y + self.b(x) if self.both else y

    for names in (["predict", "spike"], ["discrepancy"]):
        net = nn.Sequential(Two(), nn.Linear(4, 4), nn.Linear(4, 4))
        frozen = net[0].c.weight.clone()
        for method in ("checkpointed", "delayed") if names != ["discrepancy"] else ("checkpointed",):
            before = copy.deepcopy(net)
            trainer = make(net, method=method, stages=3, corrections=names)
            for i in range(12):
                net[0].both = i > 5
                trainer.step(torch.randn(3, 4), torch.randint(4, (3,)))
                for stage in trainer.stages if method == "delayed" else ():  # what an update writes into is no copy
                    own = {p.data_ptr() for p in stage.parameters if p.requires_grad}
                    assert own.isdisjoint(w.data_ptr() for copy in stage.stash.copies.values() for w in copy)
            trainer.drain()
            assert same_weights(net[0].c, before[0].c)
            assert not same_weights(net[0].b, before[0].b)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["predict"], {"method": "backprop"}, "backprop has no staleness to correct: leave predict out"),
        (["shrink"], {"method": "petra", "schedule": "1f1b"}, "1f1b has no staleness"),
        (["shrink"], {"method": "reversible", "schedule": "1f1b"}, "reversible has no staleness"),
        (["discrepancy"], {"method": "delayed"}, "the backward of delayed uses the weights of its forward"),
        (["discrepancy"], {"method": "petra-stashed"}, "leave it out, or choose petra or checkpointed"),
        (["predict", "discrepancy"], {}, "choose one of them"),
        (["coast", "discrepancy"], {}, "coast moves the forward"),
        (["predict", "coast"], {}, "both set the weights of the forward: choose one of them"),
        (["spike", "spike"], {}, "spike is given more than once"),
        (["shrink:0.5", "shrink:0.9"], {}, "shrink is given more than once"),
        (["predct"], {}, "did you mean 'predict'"),
        (["spike:3"], {}, "spike takes none"),
        (["predict:0"], {}, "predict has the horizon 0: give more than 0, like predict:2"),
        (["predict:inf"], {}, "give more than 0"),
        (["coast:1.5"], {}, "coast has factor 1.5: give more than 0 and at most 1"),
        (["reschedule"], {}, "reschedule needs a parameter: write it like reschedule:1000"),
        (["reschedule:0"], {}, "give an integer, 1 or more"),
        (["reschedule:2.5"], {}, "write it like reschedule:1000"),
        (["shrink:big"], {}, r"write it like shrink:0\.9"),
        (["shrink:1.5"], {}, "more than 0 and at most 1"),
        (["shrink:nan"], {}, "more than 0 and at most 1"),
        (["discrepancy:1"], {}, "0 or more and less than 1"),
        ("predict", {}, "give a list of names"),
        (7, {}, "corrections is 7: give a list of names"),
        (["predict"], {"optimizer": lambda p: torch.optim.SGD(p, 0.1)}, "momentum of SGD, which is 0"),
        (["coast"], {"optimizer": lambda p: torch.optim.SGD(p, 0.1)}, "or leave coast out"),
        (["predict"], {"optimizer": torch.optim.RMSprop}, "not RMSprop"),
        (["coast"], {"optimizer": torch.optim.Adagrad}, "Muon and SOAP, not Adagrad"),
        (["inertia:0"], {}, "inertia has the factor 0: give more than 0"),
        (["inertia"], {"optimizer": torch.optim.AdamW}, "not with AdamW: leave inertia out"),
        (["inertia"], {"optimizer": lambda p: torch.optim.SGD(p, 0.1)}, "SGD has momentum 0: change that"),
        (
            ["inertia"],
            {"optimizer": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1)},
            "SGD has momentum 0.9 and dampening: change that",
        ),
        (
            ["inertia"],
            {"optimizer": lambda p: torch.optim.SGD([{"params": p[:1], "momentum": 0.5}, {"params": p[1:]}], 0.1, 0.9)},
            "SGD has momentum 0.5, 0.9: change that",
        ),
        (["spike"], {"optimizer": torch.optim.AdamW}, "not with AdamW"),
        (["spike"], {"optimizer": lambda p: torch.optim.SGD(p, 0.1)}, "momentum 0"),
        (["spike"], {"optimizer": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1)}, "dampening 0.1"),
    ],
)
def test_meaningless_corrections_raise(names, options, message):
    with pytest.raises(ValueError, match=message):
        make(mixed_network(), **{"stages": 3, **options}, corrections=names)


def test_names():
    assert [str(c) for c in choose(["spike", "discrepancy", "shrink:0.5"])] == [
        *("discrepancy:0.135", "shrink:0.5", "spike")
    ]
    for kind in CORRECTIONS.values():
        assert str(find(kind.example)) == kind.example
        assert find(str(find(kind.example))) == find(kind.example)
    trainer = make(mixed_network(), stages=3, corrections=[find("shrink:0.5"), "predict"])
    assert trainer.layout["corrections"] == ["predict", "shrink:0.5"]


def test_inertia_goes_with_a_momentum_that_a_scheduler_moves():
    def cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=60)

    trainer = make(mixed_network(), stages=5, corrections=["inertia:1"], scheduler=cycle)
    for x, y in batches(12):
        trainer.step(x, y)
        for stage in trainer.stages[:-1]:
            (group,) = stage.optimizer.param_groups
            context = stage.corrections.context
            assert context.lr_factor == pytest.approx((1 - context.momentum(group)) / (1 - group["momentum"]))


def test_inertia_falls_with_the_learning_rate_once_it_has_been_at_its_highest():
    rates = [0.0, 0.5, 1.0, 0.8, 0.6, 0.1, 0.01, 0.3, 0.0, 2.0, 1.0]
    falls = [1.0, 1.0, 1.0, 1.0, 0.5, 0.125, 2**-7, 0.25, 0.0, 1.0, 0.5]

    def jumping(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: rates[t])

    trainer = make(mixed_network(), stages=5, schedule="lock-step", corrections=["inertia:9"], scheduler=jumping)
    seen = {stage.index: [stage.corrections.context.momentum_horizon] for stage in trainer.stages[:-1]}
    for x, y in batches(14):
        trainer.step(x, y)
        for stage in trainer.stages[:-1]:
            if stage.updates >= len(seen[stage.index]):
                seen[stage.index].append(stage.corrections.context.momentum_horizon)
    assert len(seen[3]) > 9
    for stage, memories in seen.items():
        assert memories == [9 * (8 - 2 * stage) ** 2 * fall for fall in falls[: len(memories)]]


def test_corrections_without_a_measured_benefit_are_experimental():
    assert [name for name, kind in CORRECTIONS.items() if not kind.experimental] == ["predict", "inertia"]
    for kind in CORRECTIONS.values():
        assert "Measured:" in kind.__doc__
        assert ("Experimental. Measured:" in " ".join(kind.__doc__.split())) == kind.experimental


@pytest.mark.parametrize("later", [1, 5])
def test_host_state_undoes_ticks_of_the_host(later):
    """Counters and containers return to what they were; tensors stay the same objects."""
    trainer = make(mixed_network(), method="features-replay", stages=4, corrections=["discrepancy", "reschedule:9"])
    data = list(batches(3 + later))
    for x, y in data[:3]:
        trainer.step(x, y)
    parts = [stage.corrections for stage in trainer.stages if stage.corrections is not None]
    before = [(part.host_state(), part.state_dict(), part.delays_so_far, part.context.lr_factor) for part in parts]
    for x, y in data[3:]:
        trainer.step(x, y)
    for part, (state, *_) in zip(parts, before, strict=True):
        assert part.context.updates != state[2]
        part.context.state.clear()
        for _ in range(2):  # a state can be loaded again
            part.load_host_state(state)
            part.context.state[next(iter(state[-1]))]["more"] = torch.zeros(1)
        part.load_host_state(state)
    after = [(part.host_state(), part.state_dict(), part.delays_so_far, part.context.lr_factor) for part in parts]
    assert [(a["updates_before"], a["zero_gradient_updates"], *rest) for _, a, *rest in after] == [
        (b["updates_before"], b["zero_gradient_updates"], *rest) for _, b, *rest in before
    ]
    for (_, now, *_), (_, then, *_) in zip(after, before, strict=True):
        assert now["state"].keys() == then["state"].keys()
        for parameter, values in then["state"].items():
            assert now["state"][parameter].keys() == values.keys()
            assert all(now["state"][parameter][key] is value for key, value in values.items())
