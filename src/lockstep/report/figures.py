"""Curves: what the page says of them in HTML, the values that its script draws, and the best value of each."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeAlias

Point: TypeAlias = tuple[float, float]

_EXPONENT_FROM = 1e7
_LOG_FROM = 20  # minimum ratio of maximum to minimum for a log axis
_MOST_BUCKETS = 320  # a longer line is drawn as this many groups of neighbouring points
# Parts long enough to be unambiguous anywhere in a name, and words that must stand alone, except for a number.
_LESS = re.compile(r"loss|error|perplexity|distance|\b(cer|err|fid|mae|s?mape|r?mse|nll|ppl|wer)\d*\b")
_GREATER = re.compile(r"acc|auc|bleu|dice|f1|iou|precision|psnr|recall|\b(m?ap|m?ar|r2|top)\d*\b")


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


def chart_html(chart: Chart) -> tuple[str, dict[str, Any]]:
    """Return a chart as HTML, and its values for the script. A screen reader says where the curves end."""
    curves = [line_values(line) for line in chart.lines]
    latest = (curve["y"][-1] for curve in curves)
    ends = [f"{line.name} ends at {shown(y)}" for line, y in zip(chart.lines, latest, strict=True)]
    label = f"{chart.title} by iteration: {', '.join(ends)}"
    finite = [y for line in chart.lines for _, y in line.points if math.isfinite(y)]
    has_log = not (chart.stacked or chart.from_zero) and 0 < _LOG_FROM * min(finite, default=0.0) <= max(finite)
    button = '<button type="button" aria-pressed="false">log</button>' if has_log else ""
    html = (
        f'<figure class="card chart"><figcaption><h3>{escape(chart.title)}{unit_html(chart.unit)}</h3>{button}'
        f'</figcaption><div class="plot" tabindex="0" role="img" aria-label="{escape(label)}"></div></figure>'
    )
    return html, {"lines": curves, "stacked": chart.stacked, "fromZero": chart.from_zero}


def line_values(line: Line, most: int = _MOST_BUCKETS) -> dict[str, Any]:
    """Return a line for the script, with more than `most` points as that many groups of neighbours at most.

    There is the last iteration of each group, the mean of its finite values or None, and, if points were grouped, their
    minimum and maximum. `faulty` has the iterations of the groups with values that are not finite.

    Example:
        >>> line_values(Line("loss", [(1, 2.0), (2, 4.0), (3, 9.0)]), most=2)["y"]
        [3.0, 9.0]
    """
    points = line.points
    size = max(1, math.ceil(len(points) / most))
    groups = [points[begin : begin + size] for begin in range(0, len(points), size)]
    finite = [[value for _, value in group if math.isfinite(value)] for group in groups]
    values: dict[str, Any] = {
        "name": line.name,
        "marked": line.marked,
        "x": [group[-1][0] for group in groups],
        "y": [_rounded(fmean(values)) if values else None for values in finite],
        "faulty": [group[-1][0] for group, values in zip(groups, finite, strict=True) if len(values) < len(group)],
    }
    if size > 1:
        values["low"] = [_rounded(min(values)) if values else None for values in finite]
        values["high"] = [_rounded(max(values)) if values else None for values in finite]
    return values


def unit_html(unit: str) -> str:
    """Return a unit as HTML, to follow a title or a value."""
    return f' <span class="unit">{escape(unit)}</span>' if unit else ""


def shown(value: float | None) -> str:
    """Return a number in readable form, with about four digits.

    Example:
        >>> shown(2342.7), shown(98.886), shown(0.01818), shown(1.4e-7), shown(30.0)
        ('2,343', '98.89', '0.01818', '1.4e-7', '30')
    """
    if value is None:
        return "not finite"
    if not math.isfinite(value):
        return str(value)
    if 0 < abs(value) < 1e-3 or abs(value) >= _EXPONENT_FROM:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1e3 else f"{value:.4g}"


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def direction_of(metric: str) -> Literal["greater", "less"] | None:
    """Return whether greater or less is better for a metric with this name; None if the name does not show it.

    Example:
        >>> [direction_of(metric) for metric in ("coco/bbox_mAP_50", "top1_error", "valacc", "fidelity")]
        ['greater', 'less', 'greater', None]
    """
    words = re.sub(r"[^a-z0-9]+", " ", metric.lower())
    if _LESS.search(words):  # checked first, because of names such as top1_error
        return "less"
    return "greater" if _GREATER.search(words) else None


def best(name: str, points: Sequence[Point]) -> Point | None:
    """Return the best finite value with its iteration; None if there is none, or the name does not show which is best.

    Example:
        >>> best("val_loss", [(10, 3.0), (20, 1.0)]), best("speed", [(10, 3.0)])
        ((20, 1.0), None)
    """
    direction = direction_of(name)
    if direction is None:
        return None
    sign = 1 if direction == "greater" else -1
    finite = [point for point in points if math.isfinite(point[1])]
    return max(finite, key=lambda point: sign * point[1], default=None)
