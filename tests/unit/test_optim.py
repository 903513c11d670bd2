"""Muon, SOAP and NAdamW compared with plain versions in float64; all as optimizers of PyTorch, and without Petra."""

import copy
import io
from itertools import pairwise

import pytest
import torch
from helpers.plain_optimizers import PlainAdamW, PlainMuon, PlainNAdamW, PlainSOAP
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from petra import models
from petra.optim import SOAP, AdamWBF16, CapturableOptimizer, Muon, NAdamW, hidden_matrices, muon_groups, orthogonalize
from petra.optim.eigenbasis import eigenbasis, improve_basis

SHAPES = st.one_of(
    st.tuples(st.integers(1, 6)),
    st.tuples(st.integers(2, 6), st.integers(2, 6)),
    st.tuples(st.integers(2, 4), st.integers(1, 2), st.integers(1, 2), st.just(2)),
).filter(lambda shape: len(shape) == 1 or fits(shape))


def fits(shape):
    """Whether three gradients make all matrices of SOAP regular: then the eigenvectors do not depend on rounding."""
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    return max(rows, columns) <= 2 * min(rows, columns)


def gradients(shapes, steps, missing, seed):
    """For every step a gradient of each parameter, whose products are exact: eigenvectors of the first ones agree."""
    generator = torch.Generator().manual_seed(seed)
    for t in range(steps):
        yield [
            None if (t, i) in missing else torch.randint(-8, 9, shape, generator=generator).double() / 4
            for i, shape in enumerate(shapes)
        ]


def train(optimizer, parameters, data, schedule=None):
    for found in data:
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype, copy=True)
        optimizer.step()
        if schedule is not None:
            schedule.step()


def check(make, plain, shapes, steps, missing, tolerance=1e-10):
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    parameters = [nn.Parameter(w.clone()) for w in start]
    optimizer = make(parameters)
    train(optimizer, parameters, gradients(shapes, steps, missing, 2))
    directions = {}
    for group in optimizer.param_groups:
        directions |= optimizer.directions(group)
    for i, (w, parameter) in enumerate(zip(start, parameters, strict=True)):
        one = plain(w)
        for found in gradients(shapes, steps, missing, 2):
            if found[i] is not None:
                w = one.step(w, found[i], 0.03)
        torch.testing.assert_close(parameter.detach(), w, rtol=tolerance, atol=tolerance)
        wanted = one.direction()
        assert (wanted is None) == (parameter not in directions)
        if wanted is not None:
            torch.testing.assert_close(directions[parameter], wanted.reshape(w.shape), rtol=tolerance, atol=tolerance)


MISSING = st.sets(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=5), steps=st.integers(1, 8), missing=MISSING, nesterov=st.booleans()
)
def test_muon_is_the_plain_one(shapes, steps, missing, nesterov):
    hidden = {i for i, shape in enumerate(shapes) if len(shape) > 1 and i % 3 < 2}

    def make(parameters):
        groups = muon_groups(parameters, {parameters[i] for i in hidden}, weight_decay=0.1)
        return Muon(groups, 0.03, momentum=0.8, nesterov=nesterov, betas=(0.7, 0.9), eps=1e-3)

    def plain(w):
        decay = 0.1 if w.ndim > 1 else 0.0
        if next(numbers) in hidden:
            return PlainMuon(0.8, nesterov, decay)
        return PlainAdamW((0.7, 0.9), 1e-3, decay)

    numbers = iter(range(len(shapes)))
    check(make, plain, shapes, steps, missing)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=5),
    steps=st.integers(1, 12),
    missing=MISSING,
    frequency=st.integers(2, 4),
    largest=st.sampled_from([1, 3, 100]),
)
def test_soap_is_the_plain_one(shapes, steps, missing, frequency, largest):
    def plain(w):
        sides = (len(w), w.numel() // len(w)) if w.ndim > 1 else ()
        if not any(1 < side <= largest for side in sides):
            return PlainAdamW((0.8, 0.9), 1e-3, 0.1)
        return PlainSOAP((0.8, 0.9), 1e-3, 0.1, frequency, largest)

    def make(parameters):
        options = {"precondition_frequency": frequency, "max_precondition_dim": largest}
        return SOAP(parameters, 0.03, (0.8, 0.9), 1e-3, weight_decay=0.1, **options)

    check(make, plain, shapes, steps, missing)


@settings(max_examples=40, deadline=None)
@given(shapes=st.lists(SHAPES, min_size=1, max_size=5), steps=st.integers(1, 12), missing=MISSING)
def test_nadamw_is_that_of_pytorch(shapes, steps, missing):
    found = []
    for make in (NAdamW, lambda *a, **k: torch.optim.NAdam(*a, **k, decoupled_weight_decay=True)):
        generator = torch.Generator().manual_seed(1)
        parameters = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]
        optimizer = make(parameters, 0.03, betas=(0.9, 0.99), weight_decay=0.1)
        train(optimizer, parameters, gradients(shapes, steps, missing, 2))
        found.append((parameters, [dict(optimizer.state[p]) for p in parameters]))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            torch.testing.assert_close(value, b[key], rtol=1e-12, atol=1e-12)


def test_nadamw_is_the_plain_one():
    shapes = [(3,), (4, 2), (2, 3)]
    check(
        lambda p: NAdamW(p, 0.03, (0.9, 0.99), weight_decay=0.1),
        lambda w: PlainNAdamW((0.9, 0.99), 1e-8, 0.1),
        shapes,
        9,
        {(0, 1), (4, 2)},
        tolerance=1e-6,  # the product of μ is kept in float32, as PyTorch does
    )


def test_muon_is_that_of_pytorch():
    theirs = getattr(torch.optim, "Muon", None)
    if theirs is None:
        pytest.skip("this PyTorch has no Muon")
    shapes, found = [(8, 8), (8, 8), (4, 12), (12, 4)], []
    options = {"momentum": 0.9, "weight_decay": 0.1}
    for make in (
        lambda p: Muon(p, 0.03, **options, dtype=torch.bfloat16),
        lambda p: theirs(p, 0.03, **options, adjust_lr_fn="match_rms_adamw"),
    ):
        generator = torch.Generator().manual_seed(1)
        parameters = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        train(make(parameters), parameters, gradients(shapes, 6, set(), 2))
        found.append(parameters)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=6 * 0.03 * 0.2 * 12**0.5 * 2**-6)  # both iterate in bfloat16


@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (7, 3)])
def test_singular_values_come_close_to_one(shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    values = u.mT @ orthogonalize(x) @ v.mT  # diagonal, because the singular vectors stay the same
    diagonal = values.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(values, torch.diag_embed(diagonal))
    assert 0.6 < diagonal.min() < diagonal.max() < 1.3
    assert not orthogonalize(torch.zeros(2, 3, 4)).any()


def test_power_iteration_finds_the_eigenvectors():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 30, generator=generator, dtype=torch.float64)
    matrices = x @ x.mT
    basis = torch.eye(6, dtype=torch.float64).expand(2, 6, 6)
    for _ in range(300):
        basis, _ = improve_basis(matrices, basis)
    exact = eigenbasis(matrices)
    torch.testing.assert_close((basis.mT @ exact).abs(), torch.eye(6, dtype=torch.float64).expand(2, 6, 6))
    values = (exact * (matrices @ exact)).sum(-2)
    assert values.equal(values.sort(descending=True)[0])


MAKERS = {
    "muon": lambda net, lr=0.05: Muon(muon_groups(net.parameters(), hidden_matrices(net), 0.1), lr),
    "soap": lambda net, lr=0.05: SOAP(net.parameters(), lr, weight_decay=0.1, precondition_frequency=3),
    "nadamw": lambda net, lr=0.05: NAdamW(net.parameters(), lr, weight_decay=0.1),
    "adamw_bf16": lambda net, lr=0.05: AdamWBF16(net.parameters(), lr, weight_decay=0.1),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.Tanh(),
        nn.Linear(6, 6),
        nn.Linear(6, 6, bias=False),
        nn.Unflatten(1, (6, 1, 1)),
        nn.Conv2d(6, 6, 1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def loop(net, optimizer, steps, first=0, scheduler=None):
    losses = []
    for t in range(first, first + steps):
        generator = torch.Generator().manual_seed(t)
        x = torch.randn(16, 4, generator=generator)
        loss = nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def same(a, b):
    return all(x.equal(y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_an_ordinary_loop_with_a_scheduler_and_a_checkpoint(name):
    nets = [network() for _ in range(2)]
    made = [MAKERS[name](net) for net in nets]
    plans = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80) for optimizer in made]
    losses = loop(nets[0], made[0], 80, 0, plans[0])
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    loop(nets[1], made[1], 31, 0, plans[1])
    file = io.BytesIO()
    torch.save([nets[1].state_dict(), made[1].state_dict(), plans[1].state_dict()], file)
    file.seek(0)
    weights, optimizer, plan = torch.load(file, weights_only=True)
    other = network()
    other.load_state_dict(weights)
    again = MAKERS[name](other)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(again, 80)
    again.load_state_dict(optimizer)
    scheduler.load_state_dict(plan)
    loop(other, again, 49, 31, scheduler)
    assert same(nets[0], other)


@pytest.mark.parametrize("name", MAKERS)
def test_a_rate_in_a_tensor_is_the_same_to_the_bit(name):
    nets = [network(), network()]
    for net, lr in zip(nets, (0.01, torch.tensor(0.01, dtype=torch.float64)), strict=True):
        loop(net, MAKERS[name](net, lr), 8)
    assert same(*nets)


@pytest.mark.parametrize("name", MAKERS)
def test_state_stays_where_it_is(name):
    net = network()
    optimizer = MAKERS[name](net)
    loop(net, optimizer, 2)
    before = addresses(optimizer)
    loop(net, optimizer, 8)
    assert addresses(optimizer) == before


def addresses(optimizer):
    states = optimizer.state.values()
    return [value.data_ptr() for state in states for value in state.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", MAKERS)
def test_a_batch_is_one_after_the_other(name):
    """Parameters of the same shape in one optimizer, or each in its own."""
    shapes = [(4, 4), (4, 4), (4, 6), (4, 6), (4, 6), (4,)]
    found = []
    for together in (True, False):
        generator = torch.Generator().manual_seed(1)
        parameters = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]
        for members in [range(6)] if together else [[i] for i in range(6)]:
            own = [parameters[i] for i in members]
            if name == "muon":
                optimizer = Muon(muon_groups(own, {p for p in own if p.ndim > 1}, 0.1), 0.01)
            else:
                optimizer = {"soap": SOAP, "nadamw": NAdamW, "adamw_bf16": AdamWBF16}[name](own, 0.01, eps=1e-3)
            train(optimizer, own, ([g[i] for i in members] for g in gradients(shapes, 15, set(), 2)))
        found.append(parameters)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_step_and_its_refresh_can_be_apart():
    nets = [network(), network()]
    optimizers = [MAKERS["soap"](net) for net in nets]
    optimizers[1].refreshes_itself = False
    for t in range(12):
        loop(nets[0], optimizers[0], 1, t)
        loop(nets[1], optimizers[1], 1, t)
        assert not t % 3 or same(*nets)
        optimizers[1].refresh()
    assert same(*nets)
    assert {state.get("updates", 12) for state in optimizers[1].state.values()} == {12}


def test_what_soap_does_not_refresh_keeps_its_basis():
    net = network()
    optimizer = MAKERS["soap"](net)
    weight = net[2].weight
    bases = []
    for t in range(8):
        loop(net, optimizer, 1, t)
        bases.append(optimizer.state[weight]["left_basis"].clone())
    changed = [not a.equal(b) for a, b in pairwise(bases)]
    assert changed == [False, False, True, False, False, True, False]
    left = optimizer.state[weight]["left_basis"]
    torch.testing.assert_close(left.T @ left, torch.eye(6))


def test_directions_are_those_of_the_last_step():
    for make in (lambda p: Muon(p, 0.1, nesterov=False), lambda p: SOAP(p, 0.1)):
        parameter = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
        optimizer = make([parameter])
        for found in gradients([(3, 4)], 5, set(), 2):
            before = parameter.detach().clone()
            train(optimizer, [parameter], [found])
        (direction,) = optimizer.directions(optimizer.param_groups[0]).values()
        torch.testing.assert_close(parameter.detach(), before - 0.1 * direction)


def test_hidden_matrices():
    net = models.create("rev-gpt", width=8, depth=2, heads=2, vocab_size=11, seq_len=4)
    names = {p: name for name, p in net.named_parameters()}
    hidden = {names[p] for p in hidden_matrices(net)}
    assert hidden == {n for n, p in net.named_parameters() if p.ndim > 1 and not n.startswith(("stem.", "head."))}
    assert hidden
    inner = nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 2), nn.Conv1d(2, 3, 2), nn.Linear(2, 1), nn.Linear(2, 2))
    assert hidden_matrices(inner) == {inner[2].weight}
    groups = muon_groups(inner.parameters(), hidden_matrices(inner), weight_decay=0.3)
    assert [(g["orthogonalize"], g["weight_decay"], len(g["params"])) for g in groups] == [
        *((True, 0.3, 1), (False, 0.3, 4), (False, 0.0, 4))
    ]
    with pytest.raises(ValueError, match="network is a Linear: give a sequence of layers"):
        hidden_matrices(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Muon(p, -1.0), "lr is -1.0: give 0 or more"),
        (lambda p: Muon(p, momentum=1.0), "momentum is 1.0: give a value from 0 to below 1"),
        (lambda p: Muon(p, steps=0), "steps is 0: give a whole number, 1 or more"),
        (lambda p: Muon(p, steps=2.5), "steps is 2.5: give a whole number"),
        (lambda p: Muon(p, dtype=torch.int32), "dtype is torch.int32: give a floating-point dtype"),
        (lambda p: Muon([nn.Parameter(torch.zeros(3))]), r"is \(3,\): give petra.optim.muon_groups\(…\), or put"),
        (lambda p: SOAP(p, betas=(0.9, 1.0)), "betas is"),
        (lambda p: SOAP(p, betas=(0.9,)), r"betas is \(0.9,\): give two values"),
        (lambda p: NAdamW(p, betas=0.9), "betas is 0.9: give two values"),
        (lambda p: NAdamW(p, lr="1"), "lr is '1': give 0 or more"),
        (lambda p: NAdamW(p, lr=float("nan")), "lr is nan: give 0 or more"),
        (lambda p: NAdamW(p, lr=torch.tensor(-1.0)), r"lr is tensor\(-1.\): give one number, 0 or more"),
        (lambda p: NAdamW([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]), "is torch.complex64: give real"),
        (lambda p: SOAP(p, precondition_frequency=0), "precondition_frequency is 0: give a whole number"),
        (lambda p: NAdamW(p, weight_decay=-0.1), "weight_decay is -0.1"),
        (lambda p: NAdamW(p, eps=-0.1), "eps is -0.1"),
        (lambda p: NAdamW(p, momentum_decay=-0.1), "momentum_decay is -0.1"),
    ],
)
def test_settings_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make([nn.Parameter(torch.zeros(2, 2))])


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Muon, {"params": [nn.Parameter(torch.zeros(3))]}, r"is \(3,\): give petra.optim.muon_groups\(…\), or put"),
        (Muon, {"params": [nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))]}, "give real parameters"),
        (SOAP, {"params": [nn.Parameter(torch.zeros(3, 3))], "betas": (0.9,)}, "betas is"),
        (NAdamW, {"params": iter([nn.Parameter(torch.zeros(3))]), "momentum_decay": "1"}, "momentum_decay is '1'"),
    ],
)
def test_groups_that_are_added_later_are_checked(make, settings, message):
    optimizer = make([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(settings)
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 3))], "lr": 0.5})
    assert optimizer.param_groups[1]["lr"] == 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_nadamw_goes_on_from_its_state_with_the_same_bits(dtype):
    parameters = [nn.Parameter(torch.ones(3, 2, dtype=dtype)), nn.Parameter(torch.ones(2, dtype=dtype))]
    optimizer, data = NAdamW(parameters, 0.01), list(gradients([(3, 2), (2,)], 8, set(), 0))
    train(optimizer, parameters, data[:4])
    copies = copy.deepcopy(parameters)
    resumed = NAdamW(copies, 0.01)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {state["mu_product"].dtype for state in resumed.state.values()} == {torch.float32}
    train(optimizer, parameters, data[4:])
    train(resumed, copies, data[4:])
    for one, two in zip(parameters, copies, strict=True):
        assert one.equal(two)
        for key, value in optimizer.state[one].items():
            assert value.equal(resumed.state[two][key])


def test_sparse_gradients_and_closures():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = NAdamW(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="NAdamW does not support sparse gradients"):
        optimizer.step()
    net = network()
    optimizer = MAKERS["muon"](net)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    twin = copy.deepcopy(optimizer)
    assert isinstance(twin, CapturableOptimizer)
    assert twin.param_groups[0]["steps"] == 5
