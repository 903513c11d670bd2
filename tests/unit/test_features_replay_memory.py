"""Table 1 of Features Replay: activations counted in features, on networks of equal layers."""

import pytest
import torch
from helpers.networks import batches, reversible_network
from helpers.trainers import make
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from petra import Network, Trainer
from petra.measure import Activations

BATCH, WIDTH = 3, 8
FEATURE = BATCH * WIDTH * 4  # bytes
SHAPES = [(12, 1), (12, 2), (12, 3), (12, 4), (24, 2), (24, 3), (24, 4), (24, 6)]  # L and K


def layer():
    """Saves its input and its output, which is the next one's input."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())


def half_square(outputs, targets):
    """A loss that saves nothing but the outputs, with a gradient of their size."""
    return (outputs * outputs).sum() / 2


def watch(method, layers, modules, device="cpu"):
    """The activations of one iteration with full histories."""
    with torch.device(device):
        network = Network(*(layer() for _ in range(layers)))
        data = [torch.randn(BATCH, WIDTH) for _ in range(modules + 2)]
    optimizer = lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9)  # noqa: E731
    trainer = Trainer(network, loss=half_square, optimizer=optimizer, method=method, stages=modules)
    for x in data[1:]:
        trainer.step(x, None)
    with Activations(trainer.executor) as found:
        trainer.step(data[0], None)
    return found


def features(method, layers, modules):
    return watch(method, layers, modules).stages.total() / FEATURE


@pytest.mark.parametrize(("layers", "modules"), SHAPES)
def test_the_orders_of_table_1(layers, modules):
    """Every module has its input, the outputs of its layers and a gradient at its output; the rest is histories."""
    histories = modules * (modules + 1) // 2  # K - k + 1 of module k
    assert features("backprop", layers, modules) == layers + 2 * modules
    assert features("features-replay", layers, modules) == layers + histories + modules  # L + K²
    graphs = layers // modules + 1
    assert features("ddg", layers, modules) == graphs * histories + modules  # LK + K²


@pytest.mark.parametrize(("layers", "modules"), SHAPES)
def test_dni_adds_its_synthesizers(layers, modules):
    """L + K L_s: a hidden layer saves what its norm takes, a mean and a deviation for each row, and what it gives."""
    hidden = 2 + 2 / WIDTH
    assert features("dni", layers, modules) == layers + 2 * modules + (modules - 1) * 2 * hidden


def test_a_module_has_as_many_inputs_as_modules_are_above_it():
    found = watch("features-replay", 12, 4).stages
    assert [found[s] / FEATURE for s in range(4)] == [4 + 3 + 1, 3 + 3 + 1, 2 + 3 + 1, 1 + 3 + 1]


@pytest.mark.parametrize("modules", [2, 3, 4, 6, 12])
def test_modules_that_take_turns_do_not_replay_at_the_same_time(modules):
    """In one process two graphs of Features Replay live, that of the last module while another replays."""
    histories = modules * (modules + 1) // 2
    assert watch("features-replay", 36, modules).peak == FEATURE * (2 * 36 // modules + histories + modules)


def test_a_graph_of_every_micro_batch_is_more_than_twice_backprop():
    assert watch("ddg", 24, 4).peak > 2 * watch("backprop", 24, 4).peak


@pytest.mark.parametrize("method", ["backprop", "features-replay", "ddg", "dni"])
def test_it_is_the_same_on_paper(method):
    """On the "meta" device nothing is computed, and the same is counted."""
    real, paper = (watch(method, 12, 3, device) for device in ("cpu", "meta"))
    assert (real.stages, real.peak) == (paper.stages, paper.peak)


def identities(again):
    """A `storage_id` that hands out numbers: those of freed memory at the next opportunity, or never again."""
    known, numbers, free = {}, {}, []

    def storage_id(tensor):
        storage = tensor.untyped_storage()
        for key in [key for key, reference in known.items() if again and key in numbers and reference.expired()]:
            free.append(numbers.pop(key))
        known.setdefault(storage._cdata, StorageWeakRef(storage))  # which also keeps the address from others
        if storage._cdata not in numbers:
            numbers[storage._cdata] = free.pop() if free else len(known)
        return numbers[storage._cdata]

    return storage_id


@pytest.mark.parametrize("method", ["petra", "features-replay", "ddg"])
def test_memory_that_takes_the_place_of_another_is_counted(method, monkeypatch):
    """What an action lets go, as a message, may be followed at its address by what autograd saves."""
    found = []
    for again in (False, True):
        monkeypatch.setattr("petra.measure.activations.storage_id", identities(again))
        trainer = make(reversible_network(6), method=method, stages=3)
        *before, last = batches(6)
        for x, y in before:
            trainer.step(x, y)
        with Activations(trainer.executor) as counted:
            trainer.step(*last)
        found.append((counted.stages, counted.peak))
    assert found[0] == found[1]


def test_memory_that_stages_share_is_counted_once_for_all_and_once_for_each():
    """A module's output is its neighbour's input."""
    found = watch("backprop", 4, 4)
    # One gradient on its way at a time; inputs, outputs.
    assert found.peak == (4 + 1 + 1) * FEATURE
    assert found.stages.total() == 4 * (1 + 1 + 1) * FEATURE


def test_a_constant_that_stages_share_is_counted_once_while_they_are_at_work():
    constant = torch.ones(100, WIDTH)

    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * constant[:BATCH]

    trainer = make(Network(Scaled(WIDTH, WIDTH), Scaled(WIDTH, WIDTH)), loss=half_square, method="backprop", stages=2)
    with Activations(trainer.executor) as found:
        trainer.step(torch.randn(BATCH, WIDTH), None)
    # The input, both outputs, and a gradient on its way.
    assert found.peak == (1 + 2 + 1) * FEATURE + constant.nbytes
    assert found.stages.total() == 2 * ((1 + 1 + 1) * FEATURE + constant.nbytes)


def test_what_is_let_go_within_an_action_counts_no_longer():
    """A reversible module has the graph of one residual function at a time, however many there are."""
    peak_lrs = []
    for blocks in (2, 6):
        trainer = make(reversible_network(blocks), stages=[1, blocks, 1], schedule="locked-forward")
        for x, y in batches(6):
            trainer.step(x, y)
        with Activations(trainer.executor) as found:
            trainer.step(x, y)
        peak_lrs.append(found.stages[1])
    assert peak_lrs[0] == peak_lrs[1]
