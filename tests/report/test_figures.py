"""What figures say in HTML, and the values that the script draws: what was recorded."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report.figures import Chart, Line, chart_html, line_values, shown

values = st.floats(-1e6, 1e6, allow_subnormal=False)


@given(st.lists(values, min_size=1, max_size=2000), st.integers(1, 400))
def test_groups_of_points_keep_extremes_and_mean(series: list[float], most: int):
    made = line_values(Line("loss", list(enumerate(series))), most)
    assert len(made["x"]) == len(made["y"]) <= most
    assert made["x"][-1] == len(series) - 1
    if len(series) <= most:
        assert made["y"] == pytest.approx(series, rel=1e-4)
        assert "low" not in made
        return
    assert min(made["low"]) == pytest.approx(min(series), rel=1e-4)
    assert max(made["high"]) == pytest.approx(max(series), rel=1e-4)
    assert all(
        low - 200 <= mean <= high + 200 for low, mean, high in zip(made["low"], made["y"], made["high"], strict=True)
    )


def test_what_is_not_finite_is_left_out_of_means_and_marked():
    made = line_values(Line("loss", [(1, 2.0), (2, math.nan), (3, math.inf), (4, math.nan)]), most=2)
    assert (made["y"], made["low"], made["high"]) == ([2.0, None], [2.0, None], [2.0, None])
    assert made["faulty"] == [2, 4]


def test_a_curve_has_its_points():
    html, drawn = chart_html(Chart("Loss", [Line("train", [(0, 4.0), (50, 2.0), (100, 1.0)])]))
    (line,) = drawn["lines"]
    assert (line["name"], line["x"], line["y"], line["faulty"]) == ("train", [0, 50, 100], [4.0, 2.0, 1.0], [])
    assert 'aria-label="Loss by iteration: train ends at 1"' in html
    assert "button" not in html


@pytest.mark.parametrize(
    ("points", "is_offered"),
    [
        ([(0, 4.0), (100, 0.01)], True),
        ([(0, 1.0), (100, 21.0)], True),
        ([(0, 1.0), (100, 19.0)], False),
        ([(0, 0.0), (100, 1e9)], False),
        ([(0, -1.0), (100, 1e9)], False),
        ([(0, math.nan)], False),
    ],
)
def test_a_wide_range_can_be_seen_in_logarithms(points: list, is_offered: bool):
    assert ("<button" in chart_html(Chart("Loss", [Line("train", points)]))[0]) is is_offered
    assert "<button" not in chart_html(Chart("Loss", [Line("train", points)], from_zero=True))[0]


def test_a_gap_stays_a_gap():
    points = [(0, 1.0), (20, 2.0), (40, math.nan), (60, 2.0), (80, math.nan)]
    html, drawn = chart_html(Chart("Loss", [Line("train", points)]))
    assert drawn["lines"][0]["y"] == [1.0, 2.0, None, 2.0, None]
    assert drawn["lines"][0]["faulty"] == [40, 80]
    assert "train ends at not finite" in html


def test_names_are_escaped():
    html, _ = chart_html(Chart("<b>", [Line("a&b", [(0, 1.0)])], "<u>"))
    assert "<b>" not in html
    assert "<u>" not in html
    assert "&lt;b&gt;" in html
    assert "a&amp;b" in html


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
        (None, "not finite"),
    ],
)
def test_numbers_are_shown_as_one_reads_them(value: float | None, text: str):
    assert shown(value) == text
