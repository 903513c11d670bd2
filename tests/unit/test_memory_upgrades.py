"""The order in which layers get storages that are faster and need more memory."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from petra.memory.upgrades import Gain, frontier, upgrades

GAIN = st.builds(Gain, st.integers(1, 20), st.integers(-3, 20))
LAYERS = st.lists(st.dictionaries(st.sampled_from("abc"), GAIN, max_size=3), min_size=1, max_size=4)
NOTHING = Gain(0, 0)


def total(gains):
    gains = list(gains)
    return sum(gain.bytes for gain in gains), sum(gain.seconds for gain in gains)


@given(LAYERS)
def test_any_number_of_upgrades_is_the_best_choice_for_its_memory(layers):
    """No other assignment of storages saves more time with at most this memory: tried with all of them."""
    every = [total(choice) for choice in product(*([NOTHING, *gains.values()] for gains in layers))]
    chosen = [NOTHING] * len(layers)
    for upgrade in upgrades(layers):
        chosen[upgrade.layer] = layers[upgrade.layer][upgrade.storage]
        need, saved = total(chosen)
        assert saved == max(seconds for size, seconds in every if size <= need)
    assert total(chosen)[1] == max(seconds for _, seconds in every)


@given(LAYERS)
def test_upgrades_of_a_layer_grow(layers):
    for index, gains in enumerate(layers):
        names = [upgrade.storage for upgrade in upgrades(layers) if upgrade.layer == index]
        assert names == [name for name, _ in frontier(gains)]
        sizes = [gains[name].bytes for name in names]
        assert sizes == sorted(set(sizes))


def test_the_last_of_equal_layers_comes_first():
    found = upgrades([{"store": Gain(4, 2)}, {"store": Gain(4, 3)}, {"store": Gain(4, 2)}])
    assert [(upgrade.layer, upgrade.rate) for upgrade in found] == [(1, 0.75), (2, 0.5), (0, 0.5)]


def test_storages_that_need_no_memory_come_before_all_others():
    found = upgrades([{"store": Gain(1, 5)}, {"store": Gain(0, 1), "selective": Gain(-3, 0)}])
    assert [(upgrade.layer, upgrade.storage) for upgrade in found] == [(1, "store"), (0, "store")]
