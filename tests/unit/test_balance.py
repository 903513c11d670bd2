"""The cut of least largest cost, compared with an exhaustive search."""

from itertools import combinations, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petra.pipeline import PartitionDoesNotFit, assign, balance


def all_cuts(layers, parts):
    for inner in combinations(range(1, layers), parts - 1):
        ends = (0, *inner, layers)
        yield [range(a, b) for a, b in pairwise(ends)]


def worth(cut, cost):
    costs = [cost(part, run) for part, run in enumerate(cut)]
    return max(costs), sum(c * c for c in costs)


@st.composite
def cases(draw):
    layers = draw(st.integers(1, 7))
    parts = draw(st.integers(1, layers))
    runs = [(p, range(i, j)) for p in range(parts) for i in range(layers) for j in range(i + 1, layers + 1)]
    # Prices of runs need not be sums, and few different ones make ties.
    prices = draw(st.lists(st.integers(0, 4), min_size=len(runs), max_size=len(runs)))
    refused = draw(st.sets(st.sampled_from(runs), max_size=len(runs) // 2))
    return layers, parts, dict(zip(runs, prices, strict=True)), refused


@given(cases())
def test_equals_the_best_of_all_cuts(case):
    layers, parts, prices, refused = case

    def cost(part, run):
        assert (part, run) not in refused
        return prices[part, run]

    possible = [cut for cut in all_cuts(layers, parts) if not refused.intersection(enumerate(cut))]
    if not possible:
        with pytest.raises(PartitionDoesNotFit):
            balance(layers, parts, cost, lambda part, run: (part, run) not in refused)
        return
    found = balance(layers, parts, cost, lambda part, run: (part, run) not in refused)
    assert found in possible
    assert worth(found, cost) == min(worth(cut, cost) for cut in possible)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9), st.data())
def test_sums_of_layers(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    found = balance(len(costs), parts, lambda part, run: sum(costs[i] for i in run))
    assert [i for run in found for i in run] == list(range(len(costs)))
    assert len(found) == parts
    best = min(max(sum(costs[i] for i in run) for run in cut) for cut in all_cuts(len(costs), parts))
    assert max(sum(costs[i] for i in run) for run in found) == best


def test_the_other_parts_are_evened_out():
    costs = [9, 1, 1, 1, 1]
    assert balance(5, 3, lambda _, run: sum(costs[i] for i in run)) == [range(0, 1), range(1, 3), range(3, 5)]


def test_the_largest_counts_before_the_squares():
    prices = {(0, 2): 3, (2, 3): 3, (0, 1): 4, (1, 3): 1, (1, 2): 9, (3, 4): 1}
    found = balance(4, 3, lambda part, run: prices.get((run.start, run.stop), 9))
    assert found == [range(0, 2), range(2, 3), range(3, 4)]  # 3, 3, 1 and not 4, 1, 1


def test_says_what_is_wrong():
    with pytest.raises(ValueError, match="3 layers cannot be cut into 4 parts: give at most 3"):
        balance(3, 4, lambda part, run: len(run))
    with pytest.raises(ValueError, match="parts is 0"):
        balance(3, 0, lambda part, run: len(run))
    with pytest.raises(
        PartitionDoesNotFit, match="part 1 cannot hold layer 2 within its limit: raise the limit"
    ) as error:
        balance(6, 3, lambda part, run: len(run), lambda part, run: len(run) <= (2, 0, 2)[part])
    assert (error.value.part, error.value.segment) == (1, range(2, 3))
    with pytest.raises(
        PartitionDoesNotFit, match="part 2 cannot hold layers 2 to 3"
    ):  # there is room for one layer on each
        balance(4, 3, lambda part, run: len(run), lambda part, run: len(run) == 1)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.data())
def test_stages_on_any_rank_are_close_to_the_best(costs, data):
    """The dearest first is never more than a third above the best of all; moves only make it better."""
    ranks = data.draw(st.integers(1, len(costs)))

    def busiest(owner):
        return max(sum(c for c, r in zip(costs, owner, strict=True) if r == rank) for rank in range(ranks))

    found = assign(costs, ranks)
    assert set(found) == set(range(ranks))
    assert found[-1] == ranks - 1
    best = min(busiest(owner) for owner in product(range(ranks), repeat=len(costs)))
    assert best <= busiest(found) <= best * 4 / 3
    top = [r for r in range(ranks) if sum(c for c, o in zip(costs, found, strict=True) if o == r) == busiest(found)]
    if len(top) == 1:  # no stage of the busiest can move or change places to good effect
        for stage in (s for s, owner in enumerate(found) if owner == top[0] and found.count(top[0]) > 1):
            for rank in range(ranks):
                assert busiest([rank if s == stage else r for s, r in enumerate(found)]) >= busiest(found)


def test_stages_change_places_where_the_dearest_first_is_not_enough():
    costs = [3, 3, 2, 2, 2]
    found = assign(costs, 2)
    assert [sum(c for c, r in zip(costs, found, strict=True) if r == rank) for rank in range(2)] == [6, 6]
