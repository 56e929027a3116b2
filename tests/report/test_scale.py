from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report.scale import Scale, fitted, fitted_log, shown

numbers = st.floats(-1e9, 1e9, allow_subnormal=False).filter(lambda value: value == 0 or abs(value) > 1e-9)


@given(st.lists(numbers, min_size=1))
def test_a_fitted_axis_shows_every_value(values: list[float]):
    scale = fitted(values)
    assert all(-1e-9 <= scale.at(value) <= 1 + 1e-9 for value in values)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 7
    assert ticks == sorted(set(ticks))
    assert all(-1e-6 <= scale.at(tick) <= 1 + 1e-6 for tick in ticks)


@given(st.lists(st.floats(1e-6, 1e6), min_size=2))
def test_a_logarithmic_axis_shows_every_value(values: list[float]):
    scale = fitted_log(values)
    if scale is None:
        assert max(values) < 20 * min(values)
        return
    assert all(-1e-9 <= scale.at(value) <= 1 + 1e-9 for value in values)
    assert 1 <= len(scale.ticks()) <= 10


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 230), [0, 50, 100, 150, 200]),
        (Scale(0, 0.0033), [0, 0.001, 0.002, 0.003]),
        (Scale(92.3, 99.6), [94, 96, 98]),
        (Scale(-1.5, 1.5), [-1, 0, 1]),
        (Scale(0.05, 30, log=True), [0.1, 0.3, 1, 3, 10, 30]),
        (Scale(1e-8, 1, log=True), [1e-8, 1e-6, 1e-4, 1e-2, 1]),
    ],
)
def test_ticks_are_round(scale: Scale, ticks: list[float]):
    assert scale.ticks() == pytest.approx(ticks)


def test_an_axis_begins_at_zero_where_that_hides_nothing():
    assert fitted([1, 100]).low == 0
    assert fitted([92, 99]).low > 90
    assert fitted([92, 99], from_zero=True).low == 0
    assert fitted([-1, 99]).low < -1


@pytest.mark.parametrize("values", [[], [math.nan], [0.0], [5.0], [-5.0, -5.0], [math.inf, 5.0]])
def test_an_axis_has_a_length_whatever_it_shows(values: list[float]):
    scale = fitted(values)
    assert scale.high > scale.low
    assert scale.ticks()


def test_values_that_do_not_range_widely_need_no_logarithms():
    assert fitted_log([1, 19]) is None
    assert fitted_log([0, 1e9]) is None
    assert fitted_log([-1, 1e9]) is None
    assert fitted_log([1, 21]) is not None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (30.0, "30"),
        (230_000, "230,000"),
        (2342.7, "2,343"),
        (98.8857, "98.89"),
        (0.5, "0.5"),
        (0.018177, "0.01818"),
        (0.0005, "5e-4"),
        (1.399e-7, "1.4e-7"),
        (-1.5, "-1.5"),
        (123456789.0, "1.23e8"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_shown_as_one_reads_them(value: float, text: str):
    assert shown(value) == text
