"""Selections from grids contain every pair of values."""

from itertools import combinations, product

from helpers.grids import all_pairs


def test_every_pair_is_contained_in_fewer_rows():
    values = ["abcd", range(3), [True, False], [(1, 2), None, 3]]
    rows = all_pairs(*map(list, values), also=[("d", 2, False, 3)])
    assert rows[0] == ("d", 2, False, 3)
    assert len(rows) == len(set(rows)) < 20
    for i, j in combinations(range(4), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(values[i], values[j]))


def test_two_parameters_are_a_product():
    assert sorted(all_pairs([1, 2], [3, 4])) == list(product([1, 2], [3, 4]))
