"""Features Replay, DDG and DNI equal their papers' pseudo-code (`replays`) bit for bit, after every iteration."""

import copy
import io

import pytest
import torch
from helpers import features_replay_reference
from helpers.features_replay import METHODS, SEED, conv_network, images, make, optimizer, scheduler
from helpers.networks import Classify, Split, residual
from helpers.trainers import same_weights
from torch.nn.functional import cross_entropy

from petra import Network, ReversibleBlock, ReversibleResidual, models
from petra.distributed import run_together

pytestmark = pytest.mark.slow


def token_loss(outputs, targets):
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def reversible_network():
    f = [residual(3) for _ in range(4)]
    return Network(
        Split(2, 3),
        ReversibleBlock(f[0], f[1]),
        ReversibleResidual(f[2]),
        ReversibleResidual(f[3]),
        Classify(3, 4).eval(),
    )


def transformer():
    return models.create("rev-gpt", width=8, depth=2, heads=2, vocab_size=7, seq_len=6)


def texts(count):
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(7, (3, 7), generator=generator) for _ in range(count)]
    return [(t[:, :-1], t[:, 1:]) for t in tokens]


def state(network, optimizers):
    momenta = [
        o.state[p].get("momentum_buffer") if p in o.state else None
        for o in optimizers
        for group in o.param_groups
        for p in group["params"]
    ]
    rates = [torch.tensor(group["lr"]) for o in optimizers for group in o.param_groups]
    return [*network.state_dict().values(), *momenta, *rates]


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def assert_same_run(method, network, sizes, data, loss=cross_entropy):
    """Step the trainer and the reference side by side, then compare what is left after draining."""
    twin = copy.deepcopy(network)
    trainer = make(network, loss, method=method, stages=sizes)
    theirs = []

    def noted(parameters):
        theirs.append(optimizer(parameters))
        return theirs[-1]

    write = {
        "features-replay": features_replay_reference.features_replay,
        "ddg": features_replay_reference.ddg,
        "dni": features_replay_reference.dni,
    }[method]
    more = {"seed": SEED} if method == "dni" else {}
    reference = write(features_replay_reference.cut(twin, sizes, SEED), data, loss, noted, scheduler, **more)
    for x, y in data:
        (finished,) = trainer.step(x, y)
        assert torch.equal(finished.loss, next(reference))
        mine = [stage.optimizer for stage in trainer.stages if stage.optimizer is not None]
        assert_equal(state(network, mine), state(twin, [o for o in theirs if o.param_groups]))
    assert trainer.executor.in_flight
    assert trainer.drain() == []
    assert list(reference) == [None] * (0 if method == "dni" else len(sizes) - 1)
    assert_equal(state(network, mine), state(twin, theirs))


@pytest.mark.parametrize("sizes", [[8], [3, 5], [2, 2, 4], [1, 2, 1, 4]], ids=len)
@pytest.mark.parametrize("method", METHODS)
def test_methods_equal_their_papers(method, sizes):
    torch.manual_seed(0)
    assert_same_run(method, conv_network(), sizes, images(12))


@pytest.mark.parametrize("method", METHODS)
def test_methods_equal_their_papers_on_reversible_networks(method):
    torch.manual_seed(0)
    assert_same_run(method, reversible_network(), [1, 2, 2], images(8, 4))


@pytest.mark.parametrize("method", METHODS)
def test_methods_equal_their_papers_on_transformers(method):
    torch.manual_seed(0)
    network = transformer()
    assert_same_run(method, network, [2, len(network) - 3, 1], texts(8), token_loss)


@pytest.mark.parametrize("method", METHODS)
def test_short_runs_equal_their_papers(method):
    """Fewer micro-batches than modules."""
    torch.manual_seed(0)
    assert_same_run(method, conv_network(), [2, 2, 2, 2], images(2))


@pytest.mark.parametrize("method", METHODS)
def test_one_module_is_backprop(method):
    torch.manual_seed(0)
    network = conv_network()
    twin = copy.deepcopy(network)
    for n, name in ((network, method), (twin, "backprop")):
        trainer = make(n, method=name)
        for x, y in images(12):
            trainer.step(x, y)
        trainer.drain()
    assert same_weights(network, twin)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_what_they_have_in_common_with_pipelined_methods(k):
    """Stage by stage the locked forward pass changes nothing; DDG's graphs are what `delayed` computes again."""
    torch.manual_seed(0)
    network, weights = conv_network(), {}
    for name, method, schedule in (
        ("features-replay", "features-replay", None),
        ("checkpointed", "checkpointed", "locked-forward"),
        ("ddg", "ddg", None),
        ("delayed", "delayed", "locked-forward"),
        ("pipelined", "checkpointed", "low-staleness"),
    ):
        trainer = make(copy.deepcopy(network), method=method, stages=4, schedule=schedule, accumulate=k)
        for _ in range(2):  # the second filling begins with no zero features
            for x, y in images(7):
                trainer.step(x, y)
            trainer.drain()
        weights[name] = trainer.network
        updates = [stage.updates for stage in trainer.stages]
        blank = [-(-n // k) for n in (3, 2, 1, 0)] if name != "pipelined" else [0] * 4
        assert updates == [2 * -(-7 // k) + b for b in blank]
    assert same_weights(weights["features-replay"], weights["checkpointed"])
    assert same_weights(weights["ddg"], weights["delayed"])
    assert not same_weights(weights["features-replay"], weights["pipelined"])  # weight decay before the first gradient


def test_in_flight_delayed_differs_from_ddg_by_running_statistics_alone():
    torch.manual_seed(0)
    network = conv_network()
    ddg, delayed = (
        make(copy.deepcopy(network), method=method, stages=4, schedule=schedule)
        for method, schedule in (("ddg", None), ("delayed", "locked-forward"))
    )

    def moments():
        pairs = zip(ddg.network.named_buffers(), delayed.network.named_buffers(), strict=True)
        return [torch.equal(a, b) for (name, a), (_, b) in pairs if "running" in name]

    for x, y in images(7):
        ddg.step(x, y)
        delayed.step(x, y)
    assert all(map(torch.equal, ddg.network.parameters(), delayed.network.parameters()))
    assert not any(moments())
    for trainer in (ddg, delayed):
        trainer.drain()
    assert all(moments())
    assert same_weights(ddg.network, delayed.network)


def test_a_graph_of_predicted_weights_outlives_the_prediction():
    torch.manual_seed(0)
    network, weights = conv_network(), []
    for method, schedule in (("ddg", None), ("delayed", "locked-forward")):
        trainer = make(copy.deepcopy(network), method=method, stages=4, schedule=schedule, corrections=["predict"])
        for x, y in images(8):
            trainer.step(x, y)
        trainer.drain()
        weights.append(trainer.network)
    assert same_weights(*weights)


def test_a_graph_outlives_updates_of_a_reversible_run_inside_a_layer():
    torch.manual_seed(0)
    layers = reversible_network()
    network, weights = Network(layers[0], Network(*layers[1:3]), Network(layers[3]), layers[4]), []
    for method, schedule in (("ddg", None), ("delayed", "locked-forward")):
        trainer = make(copy.deepcopy(network).double(), method=method, stages=4, schedule=schedule)
        for x, y in images(6):
            trainer.step(x.double(), y)
        trainer.drain()
        weights.append(trainer.network.state_dict())
    for name, value in weights[0].items():  # from streams that were reconstructed, so not to the last bit
        torch.testing.assert_close(value, weights[1][name], rtol=1e-9, atol=1e-9, msg=name)


def test_a_layer_that_is_frozen_while_its_graphs_wait_stays_as_it_is():
    network = conv_network()
    trainer = make(network, method="ddg", stages=4)
    data = list(images(8))
    for x, y in data[:4]:
        trainer.step(x, y)
    frozen = network[0].requires_grad_(False)[0].weight
    frozen.grad, before = None, frozen.clone()
    for x, y in data[4:]:
        trainer.step(x, y)
    trainer.drain()
    assert frozen.equal(before)


def test_hooks_on_gradients_run_though_graphs_are_of_other_parameters():
    torch.manual_seed(0)
    network, weights = conv_network(), []
    for method, schedule in (("ddg", None), ("delayed", "locked-forward")):
        trained, seen = copy.deepcopy(network), []
        trained[0][0].weight.register_hook(lambda g, seen=seen: seen.append(g.requires_grad) or g * 0.1)
        trained[1][0].weight.register_hook(lambda g: None)
        trainer = make(trained, method=method, stages=4, schedule=schedule)
        for x, y in images(6):
            trainer.step(x, y)
        trainer.drain()
        assert seen == [False] * 6
        weights.append(trained)
    assert same_weights(*weights)


def test_petra_takes_the_order_of_features_replay_and_keeps_no_history():
    """The variant for reversible modules: inputs are reconstructed from what the module above sends down."""
    torch.manual_seed(0)
    network = reversible_network()
    kept = {}
    for method in ("features-replay", "petra"):
        trainer = make(
            copy.deepcopy(network), method=method, stages=5, schedule="locked-forward" if method == "petra" else None
        )
        for x, y in images(9, 4):
            trainer.step(x, y)
        kept[method] = [
            len(k.inputs) for k in (SavedState for stage in trainer.stages for SavedState in stage.saved.values())
        ]
        trainer.drain()
    assert kept["features-replay"] == [1] * (4 + 3 + 2 + 1)
    assert kept["petra"] == [1] * 4 + [0] * (3 + 2 + 1)  # the first layer is not reversible


@pytest.mark.parametrize(
    ("method", "stages", "k"),
    [(method, stages, 1 + (i + stages) % 2) for i, method in enumerate(METHODS) for stages in (2, 3, 4)],
)
def test_ranks_equal_one_process(method, k, stages):
    """Ranks are threads here; `test_ranks` has these methods on processes."""
    data = images(9)

    def work(transport=None, **options):
        torch.manual_seed(0)
        trainer = make(conv_network(), method=method, stages=stages, accumulate=k, transport=transport, **options)
        losses = [float(f.loss) for x, y in data for f in trainer.step(x, y)]
        trainer.drain()
        weights = {n: v for n, v in trainer.network.state_dict().items() if not v.is_meta}
        return weights, {stage.index: stage.optimizer.state_dict()["state"] for stage in trainer.stages}, losses

    weights, momenta, losses = work()
    placements = ((2, [0, 0, 1, 1]), (2, [0, 1, 0, 1]), (3, [1, 0, 0, 2])) if stages == 4 else ()
    for ranks, placement in ((stages, None), *placements):
        found = run_together(lambda transport, p=placement: work(transport, placement=p), ranks)
        for part, expected in enumerate((weights, momenta)):
            merged = {name: value for rank in found for name, value in rank[part].items()}
            torch.testing.assert_close(merged, expected, rtol=0, atol=0)
        assert [value for _, _, one in found for value in one] == losses


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("k", [1, 2])
def test_resumed_from_any_iteration_through_a_file(method, k):
    """Also twice in a row, before what was in flight has left."""
    data = images(8)
    torch.manual_seed(0)
    network = conv_network()
    straight = make(copy.deepcopy(network), method=method, stages=4, accumulate=k)
    going = make(network, method=method, stages=4, accumulate=k)
    for x, y in data:
        straight.step(x, y)
        going.step(x, y)
        buffer = io.BytesIO()
        torch.save(going.state_dict(), buffer)
        buffer.seek(0)
        going = make(conv_network(), method=method, stages=4, accumulate=k)
        going.load_state_dict(torch.load(buffer, weights_only=True))
    for trainer in (straight, going):
        trainer.drain()
    mine, theirs = ([s.optimizer for s in trainer.stages if s.optimizer] for trainer in (going, straight))
    assert_equal(state(going.network, mine), state(straight.network, theirs))
