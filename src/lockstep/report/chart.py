"""Curves as HTML: an SVG that stretches with the page, and labels that do not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

from lockstep.report.scale import Scale, fitted, fitted_log, shown

Point: TypeAlias = tuple[float, float]

SIDE = 1000  # units of a plot in both directions, whatever its size on the page
MOST_BUCKETS = 320  # a longer line is drawn as this many groups of neighbouring points


class Line(NamedTuple):
    """One curve: its name, its points in order, and whether each is marked."""

    name: str
    points: Sequence[Point]
    marked: bool = False


class Chart(NamedTuple):
    """Some curves in one frame.

    Attributes:
        title: what the curves show.
        lines: at least one, each with at least one point.
        unit: the unit of the values.
        stacked: the lines are parts of a whole, at the same iterations, and are drawn on top of each other.
        from_zero: the axis of values begins at zero.
    """

    title: str
    lines: Sequence[Line]
    unit: str = ""
    stacked: bool = False
    from_zero: bool = False


class Bucket(NamedTuple):
    """Some neighbouring points as one.

    Attributes:
        x: the last iteration of the points.
        mean: the mean of their finite values; None if there are none.
        low: the minimum of these.
        high: the maximum of these.
        faulty: whether any of their values is not finite.
    """

    x: float
    mean: float | None
    low: float
    high: float
    faulty: bool = False


def chart_html(chart: Chart, across: Scale) -> tuple[str, dict[str, Any]]:
    """Return a chart as HTML, and its values for the script that shows them at the cursor.

    Args:
        chart: what to draw.
        across: the axis of iterations.
    """
    curves = [buckets(line.points) for line in chart.lines]
    tops = _stacked(curves) if chart.stacked else curves
    extremes = [value for curve in tops for bucket in curve for value in (bucket.low, bucket.high)]
    up = fitted(extremes, from_zero=chart.from_zero or chart.stacked)
    log = None if chart.stacked or chart.from_zero else fitted_log(extremes)
    kind = "chart is-stacked" if chart.stacked else "chart"
    return figure_html(chart, curves, tops, (across, up, log), kind=kind, spoken=_spoken(chart, curves))


def figure_html(
    chart: Chart,
    curves: Sequence[list[Bucket]],
    tops: Sequence[list[Bucket]],
    axes: tuple[Scale, Scale, Scale | None],
    *,
    kind: str,
    spoken: str,
    mark: str = "",
) -> tuple[str, dict[str, Any]]:
    """Return curves as HTML, and their values for the script.

    Args:
        chart: what to draw.
        curves: its lines.
        tops: where they are drawn; they differ from the curves if these are stacked.
        axes: the axis of iterations, that of values, and a logarithmic one, if there is one.
        kind: the class of the figure.
        spoken: what a screen reader says.
        mark: HTML above the curves.
    """
    across, up, log = axes
    layers = _layer_html(chart, tops, across, up, "linear")
    if log is not None:
        layers += _layer_html(chart, tops, across, log, "log")
    legend = "".join(
        f'<li style="--c:var(--c{index % 6})">{escape(line.name)} <output>{_latest(curve)}</output></li>'
        for index, (line, curve) in enumerate(zip(chart.lines, curves, strict=True))
    )
    toggle = '<button type="button" aria-pressed="false">log</button>' if log is not None else ""
    html = (
        f'<figure class="card {kind}">'
        f"<figcaption><h3>{escape(chart.title)}{unit_html(chart.unit)}</h3>{toggle}<ul>{legend}</ul></figcaption>"
        f'<div class="plot" tabindex="0" role="img" aria-label="{escape(spoken)}">'
        f'{layers}{mark}{across_html(across)}<div class="cursor" hidden></div></div></figure>'
    )
    values = {
        "lines": [_values_of(curve) for curve in curves],
        "stacked": chart.stacked,
        "linear": [up.low, up.high],
        "log": None if log is None else [log.low, log.high],
    }
    return html, values


def buckets(points: Sequence[Point], most: int = MOST_BUCKETS) -> list[Bucket]:
    """Return the points in at most `most` groups of equal size (the last may be smaller); few points stay single.

    Example:
        >>> [bucket.mean for bucket in buckets([(1, 2.0), (2, 4.0), (3, 9.0)], most=2)]
        [3.0, 9.0]
    """
    size = max(1, math.ceil(len(points) / most))
    return [_bucket(points[begin : begin + size]) for begin in range(0, len(points), size)]


def _layer_html(chart: Chart, curves: Sequence[list[Bucket]], across: Scale, up: Scale, kind: str) -> str:
    """Return the curves on one pair of axes, with the labels beside them; `kind` is the layer's class."""
    ticks = up.ticks()
    rules = "".join(f"M{_position(across.low, tick, across, up)}h{SIDE}" for tick in ticks)
    labels = "".join(f'<span style="bottom:{100 * up.at(tick):.2f}%">{shown(tick)}</span>' for tick in ticks)
    drawn = []
    # The first part of a stack is at the bottom, in front of the areas of the parts above it.
    for index in reversed(range(len(curves))):
        curve, colour = curves[index], f'style="--c:var(--c{index % 6})"'
        means = [_position(bucket.x, bucket.mean, across, up) for bucket in curve]
        if any(bucket.high > bucket.low for bucket in curve):
            filled = "area" if chart.stacked else "band"
            drawn.append(f'<path class="{filled}" {colour} d="{_band_path(curve, across, up)}"/>')
        strokes = ("M" + "L".join(stroke) for is_there, stroke in groupby(means, key=bool) if is_there)
        drawn.append(f'<path class="line" {colour} d="{"".join(strokes)}"/>')
        if chart.lines[index].marked or sum(map(bool, means)) == 1:
            dots = "".join(f"M{mean}h0" for mean in means if mean)
            drawn.append(f'<path class="dots" {colour} d="{dots}"/>')
        if faulty := "".join(f"M{_position(b.x, up.high, across, up)}v40" for b in curve if b.faulty):
            drawn.append(f'<path class="faulty" d="{faulty}"><title>not a finite number</title></path>')
    return (
        f'<div class="layer {kind}"><svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="rules" d="{rules}"/>{"".join(drawn)}</svg><div class="up">{labels}</div></div>'
    )


def unit_html(unit: str) -> str:
    """Return a unit as HTML, to follow a title or a value."""
    return f' <span class="unit">{escape(unit)}</span>' if unit else ""


def across_html(across: Scale) -> str:
    """Return the labels below the axis of iterations."""
    labels = "".join(
        f'<span style="left:{100 * across.at(tick):.2f}%">{shown(tick)}</span>' for tick in across.ticks(6)
    )
    return f'<div class="across">{labels}</div>'


def _stacked(curves: Sequence[list[Bucket]]) -> list[list[Bucket]]:
    """Return the curves stacked on top of each other, each with a band down to zero."""
    tops: list[list[Bucket]] = []
    heights = [0.0] * len(curves[0])
    for curve in curves:
        heights = [height + (bucket.mean or 0.0) for height, bucket in zip(heights, curve, strict=True)]
        tops.append([Bucket(bucket.x, height, 0.0, height) for height, bucket in zip(heights, curve, strict=True)])
    return tops


def _band_path(curve: Sequence[Bucket], across: Scale, up: Scale) -> str:
    there = [bucket for bucket in curve if bucket.mean is not None]
    upper = [_position(bucket.x, bucket.high, across, up) for bucket in there]
    lower = [_position(bucket.x, bucket.low, across, up) for bucket in reversed(there)]
    return "M" + "L".join(upper + lower) + "Z"


def _position(x: float, value: float | None, across: Scale, up: Scale) -> str:
    """Return the position at which a value is drawn; an empty string for None."""
    return "" if value is None else f"{SIDE * across.at(x):.4g} {SIDE * (1 - up.at(value)):.4g}"


def _latest(curve: Sequence[Bucket]) -> str:
    """Return the last value of a curve."""
    return "not finite" if curve[-1].mean is None else shown(curve[-1].mean)


def _values_of(curve: Sequence[Bucket]) -> dict[str, Any]:
    """Return the points of a curve for the script."""
    return {
        "x": [bucket.x for bucket in curve],
        "y": [None if bucket.mean is None else float(f"{bucket.mean:.5g}") for bucket in curve],
    }


def _spoken(chart: Chart, curves: Sequence[list[Bucket]]) -> str:
    ends = [f"{line.name} ends at {_latest(curve)}" for line, curve in zip(chart.lines, curves, strict=True)]
    return f"{chart.title} by iteration: {', '.join(ends)}"


def _bucket(points: Sequence[Point]) -> Bucket:
    values = [value for _, value in points if math.isfinite(value)]
    faulty = len(values) < len(points)
    if not values:
        return Bucket(points[-1][0], None, math.nan, math.nan, faulty)
    return Bucket(points[-1][0], fmean(values), min(values), max(values), faulty)
