"""Series, charts, heat maps: what is drawn is what was recorded."""

from __future__ import annotations

import math
import re
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report.chart import Chart, Line, buckets, chart_html
from lockstep.report.heatmap import LEVELS, HeatMap, Stretch, heatmap_html
from lockstep.report.page import highlighted
from lockstep.report.scale import Scale

ACROSS = Scale(0, 100)
values = st.floats(-1e6, 1e6)


@given(st.lists(values, min_size=1, max_size=2000), st.integers(1, 400))
def test_buckets_keep_extremes_and_mean(series: list[float], most: int):
    made = buckets(list(enumerate(series)), most)
    assert len(made) <= most
    assert min(bucket.low for bucket in made) == min(series)
    assert max(bucket.high for bucket in made) == max(series)
    assert made[-1].x == len(series) - 1
    assert all(bucket.low <= bucket.mean + 1e-6 and bucket.mean <= bucket.high + 1e-6 for bucket in made)
    if len(series) <= most:
        assert [bucket.mean for bucket in made] == series


def test_what_is_not_finite_is_left_out_of_means_and_marked():
    first, second = buckets([(1, 2.0), (2, math.nan), (3, math.inf), (4, math.nan)], most=2)
    assert (first.mean, first.low, first.high, first.faulty) == (2.0, 2.0, 2.0, True)
    assert (second.mean, second.faulty) == (None, True)


def paths_of(html: str, kind: str) -> list[str]:
    return re.findall(rf'<path class="{kind}"[^>]* d="([^"]*)"', html)


def test_a_curve_goes_through_its_points():
    html, read_out = chart_html(Chart("Loss", [Line("train", [(0, 4.0), (50, 2.0), (100, 1.0)])]), ACROSS)
    (line,) = paths_of(html, "line")
    points = [tuple(map(float, point.split())) for point in line.removeprefix("M").split("L")]
    assert [x for x, _ in points] == [0, 500, 1000]
    high = read_out["linear"][1]
    assert [y for _, y in points] == pytest.approx([1000 * (1 - value / high) for value in (4, 2, 1)], abs=0.5)
    assert read_out["lines"] == [{"x": [0, 50, 100], "y": [4.0, 2.0, 1.0]}]
    assert "<output>1</output>" in html
    assert read_out["log"] is None
    assert "button" not in html


def test_a_wide_range_can_be_seen_in_logarithms():
    html, read_out = chart_html(Chart("Loss", [Line("train", [(0, 4.0), (100, 0.01)])]), ACROSS)
    assert read_out["log"] is not None
    assert len(paths_of(html, "line")) == 2
    assert "<button" in html


def test_a_gap_stays_a_gap():
    points = [(0, 1.0), (20, 2.0), (40, math.nan), (60, 2.0), (80, math.nan)]
    html, read_out = chart_html(Chart("Loss", [Line("train", points)]), ACROSS)
    (line,) = paths_of(html, "line")
    assert line.count("M") == 2
    assert len(paths_of(html, "faulty")[0].split("M")) == 3
    assert read_out["lines"][0]["y"] == [1.0, 2.0, None, 2.0, None]
    assert "<output>not finite</output>" in html


def test_a_curve_of_nothing_finite_can_be_drawn():
    html, read_out = chart_html(Chart("Loss", [Line("train", [(10, math.nan)])]), ACROSS)
    assert paths_of(html, "line") == [""]
    assert read_out["lines"][0]["y"] == [None]


def test_long_curves_have_a_band():
    html, read_out = chart_html(Chart("Loss", [Line("train", [(x / 10, x % 7) for x in range(1000)])]), ACROSS)
    assert len(paths_of(html, "band")) == 1
    assert len(read_out["lines"][0]["x"]) <= 320


def test_long_curves_are_shown_on_one_axis_at_a_time():
    html, _ = chart_html(Chart("Loss", [Line("train", [(x / 10, 1 + x % 70) for x in range(1000)])]), ACROSS)
    assert re.findall(r'<div class="layer (\w+)">', html) == ["linear", "log"]


def test_parts_are_stacked():
    lines = [Line("compute", [(0, 3.0), (100, 3.0)]), Line("wait", [(0, 1.0), (100, 2.0)])]
    html, read_out = chart_html(Chart("Step", lines, "ms", stacked=True), ACROSS)
    assert len(paths_of(html, "area")) == 2
    assert read_out["linear"][1] > 5
    assert [line["y"] for line in read_out["lines"]] == [[3.0, 3.0], [1.0, 2.0]]


def test_names_are_escaped():
    html, _ = chart_html(Chart("<b>", [Line("a&b", [(0, 1.0)])], "<u>"), ACROSS)
    assert "<b>" not in html
    assert "<u>" not in html
    assert "&lt;b&gt;" in html
    assert "a&amp;b" in html


def heatmap_of(rows: list[list[float]], every: int = 10) -> HeatMap:
    stretches = [Stretch(every * index, every * (index + 1), row) for index, row in enumerate(rows)]
    return HeatMap("Compute", stretches, "ms")


def cells_of(html: str) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the level and the width of each cell, by where it begins and its rank."""
    cells = {}
    for level, path in re.findall(r'<path class="h(\d)" d="([^"]*)"', html):
        for begin, rank, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", path):
            cells[int(begin), int(rank)] = (int(level), int(width))
    return cells


def test_a_slow_rank_stands_out():
    html, read_out = heatmap_html(heatmap_of([[10.0, 10.0], [10.0, 30.0], [10.0, 30.0]]), ACROSS)
    assert cells_of(html) == {(0, 0): (0, 30), (0, 1): (0, 10), (10, 1): (LEVELS - 1, 20)}
    assert read_out["values"] == [[10.0, 10.0], [10.0, 30.0], [10.0, 30.0]]


def test_what_is_nearly_equal_looks_equal():
    html, _ = heatmap_html(heatmap_of([[10.0, 10.2], [10.1, 10.0]]), ACROSS)
    assert {level for level, _ in cells_of(html).values()} == {0}


def test_a_slow_start_does_not_hide_the_rest():
    rows = [[1000.0, 1000.0], *([[10.0, 15.0]] * 99)]
    html, _ = heatmap_html(heatmap_of(rows, every=1), ACROSS)
    levels = {rank: level for (begin, rank), (level, _) in cells_of(html).items() if begin == 1}
    assert levels[1] - levels[0] >= 2


def test_many_records_and_ranks_become_fewer_cells():
    html, read_out = heatmap_html(
        heatmap_of([[float(rank + row % 3) for rank in range(512)] for row in range(900)]), ACROSS
    )
    assert len(read_out["end"]) == 20
    assert read_out["begin"][1:] == read_out["end"][:-1]
    assert read_out["end"][-1] == 9000
    assert all(row[0] == pytest.approx(1.0, abs=0.01) for row in read_out["values"])
    assert html.count("top:") == 8


def test_gaps_between_records_stay_empty():
    stretches = [Stretch(0, 10, [1.0]), Stretch(40, 50, [1.0])]
    html, _ = heatmap_html(HeatMap("Step", stretches, "ms"), ACROSS)
    assert {begin: width for (begin, _), (_, width) in cells_of(html).items()} == {0: 10, 40: 10}


@pytest.mark.parametrize(
    ("source", "html"),
    [
        (
            "a = 'x < y'  # & so\n",
            'a = <span class="string">\'x &lt; y\'</span>  <span class="comment"># &amp; so</span>\n',
        ),
        ("import a\n", '<span class="keyword">import</span> a\n'),
        ("a = '''x\ny'''\nb = a\n", "a = <span class=\"string\">'''x\ny'''</span>\nb = a\n"),
        ("b = [None,\n     2]", 'b = [<span class="number">None</span>,\n     <span class="number">2</span>]'),
        ("a = (1 <", 'a = (<span class="number">1</span> &lt;'),
        ("", ""),
    ],
)
def test_source_is_coloured(source: str, html: str):
    assert highlighted(source) == html


@given(st.text(st.characters(exclude_characters="\r")))  # files are read with line ends of one kind
def test_any_text_can_be_shown(text: str):
    assert unescape(re.sub(r"</?span[^>]*>", "", highlighted(text))) == text
