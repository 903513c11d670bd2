"""Axes of figures and reports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petra.measure.ticks import Axis, format_bytes, format_seconds, linear_ticks, log_ticks, spans_decades


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.13, 6.6, [0, 2, 4, 6, 8]),
        (-3, 4, [-4, -2, 0, 2, 4]),
        (92.3, 94.1, [92, 92.5, 93, 93.5, 94, 94.5]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low, high, expected):
    assert linear_ticks(low, high) == expected


@pytest.mark.parametrize(("last", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 3, 4, 5, 6]), (90, [20, 40, 60, 80])])
def test_epochs_are_whole_numbers(last, expected):
    assert linear_ticks(1, last, 6, integer=True) == expected


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_there_are_few_ticks_for_any_range(low, width):
    found = linear_ticks(low, low + width)
    assert found[0] <= low + 1e-9 * (abs(low) + width)
    assert found[-1] >= low + width - 1e-9 * (abs(low) + width)
    assert 2 <= len(found) <= 8 or width < 1e-9 * abs(low)


@given(st.floats(1e-9, 1e6), st.floats(1.01, 1e12))
def test_logarithmic_ticks_enclose_any_range(low, ratio):
    found = log_ticks(low, low * ratio)
    assert found[0] <= low * (1 + 1e-9)
    assert found[-1] >= low * ratio * (1 - 1e-9)
    assert found == sorted(set(found))
    assert 2 <= len(found) <= 9


def test_labels():
    assert Axis.of([0.3, 0.98], "percent").labels == ("20 %", "40 %", "60 %", "80 %", "100 %")
    assert Axis.of([0, 3 * 2**20], "bytes", zero=True).labels == ("0", "1 MiB", "2 MiB", "3 MiB")
    assert Axis.of([0, 400], "seconds").labels[-1].endswith("min")
    assert Axis.of([1, 3], "integer").labels == ("1", "2", "3")
    assert Axis.of([1e-5, 4e-5]).labels[0] == "10⁻⁵"


@pytest.mark.parametrize("values", [[], [0.0], [1.0], [1.0, 1.0 + 1e-16], [-2.0]])
def test_a_single_value_is_in_the_middle_of_something(values):
    axis = Axis.of(values)
    assert axis.low < axis.high
    assert len(axis.ticks) >= 2
    assert all(axis.low <= value <= axis.high for value in values)


def test_positions():
    assert Axis.of([0, 10]).position(5) == 0.5
    log = Axis.of([0.1, 10], log=True)
    assert log.log
    assert log.position(1) == pytest.approx(0.5)
    assert not Axis.of([0, 10], log=True).log  # zero has no logarithm


def test_losses_that_span_decades():
    assert spans_decades([0.05, 7.0])
    assert not spans_decades([2.0, 10.0])
    assert not spans_decades([0.0, 10.0])
    assert not spans_decades([])


def test_sizes_and_durations():
    assert [format_bytes(n) for n in (12, 1536, 3 * 2**30)] == ["12 B", "1.50 KiB", "3.00 GiB"]
    assert [format_seconds(s) for s in (4.25, 200, 18720)] == ["4.2 s", "3 min 20 s", "5 h 12 min"]
