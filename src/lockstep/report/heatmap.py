"""Heat maps: one number per rank and stretch of iterations, as a colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from statistics import fmean
from typing import Any, NamedTuple

from lockstep.report.chart import across_html, unit_html
from lockstep.report.scale import Scale, shown

LEVELS = 9
_MOST_CELLS = 8_000
_MOST_COLUMNS = 160
_ROW_LABELS = 8
_SHORT_NUMBERS = 100


class Stretch(NamedTuple):
    """The iterations after `begin` up to `end`, and one value for each rank."""

    begin: int
    end: int
    values: list[float]


class HeatMap(NamedTuple):
    """Stretches of iterations in order, all with the same number of values.

    Attributes:
        title: what the values show.
        stretches: at least one.
        unit: the unit of the values.
        note: an explanation of how to read it.
    """

    title: str
    stretches: Sequence[Stretch]
    unit: str
    note: str = ""


def heatmap_html(heatmap: HeatMap, across: Scale) -> tuple[str, dict[str, Any]]:
    """Return a heat map as HTML, and its values for the script that shows them at the cursor.

    Args:
        heatmap: what to draw.
        across: the axis of iterations.
    """
    size = len(heatmap.stretches[0].values)
    most = min(_MOST_COLUMNS, max(20, _MOST_CELLS // size))
    together = math.ceil(len(heatmap.stretches) / most)  # number of neighbours that become one stretch
    groups = range(0, len(heatmap.stretches), together)
    stretches = [_joined(heatmap.stretches[begin : begin + together]) for begin in groups]
    low, high = _range([value for stretch in stretches for value in stretch.values])
    paths = "".join(f'<path class="h{level}" d="{path}"/>' for level, path in _paths(stretches, low, high).items())
    width = round(across.high - across.low, 6)
    label = "rank " if size <= _SHORT_NUMBERS else ""
    labels = "".join(
        f'<span style="top:{100 * (rank + 0.5) / size:.2f}%">{label}{rank}</span>'
        for rank in range(0, size, math.ceil(size / _ROW_LABELS))
    )
    steps = "".join(f'<i class="h{level}"></i>' for level in range(LEVELS))
    html = (
        f'<figure class="card heatmap"><figcaption><h3>{escape(heatmap.title)}{unit_html(heatmap.unit)}</h3>'
        f'<p class="key"><output></output>{shown(low)} {steps} {shown(high)}</p></figcaption>'
        f'<div class="plot" tabindex="0" role="img" style="--rows:{size}" '
        f'aria-label="{escape(heatmap.title)} by rank and iteration: {shown(low)} to {shown(high)} '
        f'{escape(heatmap.unit)}"><div class="layer"><svg viewBox="{across.low:g} 0 {width:g} {size}" '
        f'preserveAspectRatio="none" aria-hidden="true">{paths}</svg><div class="up">{labels}</div></div>'
        f'{across_html(across)}<div class="cursor" hidden></div></div>'
        f"{f'<p class=note>{escape(heatmap.note)}</p>' if heatmap.note else ''}</figure>"
    )
    values = {
        "begin": [stretch.begin for stretch in stretches],
        "end": [stretch.end for stretch in stretches],
        "values": [[float(f"{value:.4g}") for value in stretch.values] for stretch in stretches],
        "unit": heatmap.unit,
    }
    return html, values


def _joined(stretches: Sequence[Stretch]) -> Stretch:
    """Merge neighbouring stretches into one, with means weighted by iterations."""
    lengths = [stretch.end - stretch.begin for stretch in stretches]
    by_rank = zip(*(stretch.values for stretch in stretches), strict=True)
    means = [fmean(values, lengths) for values in by_rank]
    return Stretch(stretches[0].begin, stretches[-1].end, means)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of the colour scale.

    Outliers, such as a slow start, do not hide other differences, and nearly equal values look alike.
    """
    ordered = sorted(values)
    low, middle, most = ordered[0], ordered[len(ordered) // 2], ordered[-1]
    almost_all = ordered[int(0.98 * (len(ordered) - 1))]
    high = min(most, max(almost_all, 2 * middle))
    return low, max(high, low + middle / 4)


def _paths(stretches: Sequence[Stretch], low: float, high: float) -> dict[int, str]:
    """Return the cells of each level as one path; equal neighbours in a row become one cell."""
    paths: dict[int, list[str]] = {level: [] for level in range(LEVELS)}
    for rank in range(len(stretches[0].values)):
        levels = [_level(stretch.values[rank], low, high) for stretch in stretches]
        first = 0
        for index, level in enumerate(levels):
            last = index + 1 == len(levels)
            if last or levels[index + 1] != level or stretches[index + 1].begin != stretches[index].end:
                begin, end = stretches[first].begin, stretches[index].end
                paths[level].append(f"M{begin} {rank}h{end - begin}v1h{begin - end}z")
                first = index + 1
    return {level: "".join(cells) for level, cells in paths.items() if cells}


def _level(value: float, low: float, high: float) -> int:
    if high <= low:
        return 0
    return min(LEVELS - 1, max(0, int((value - low) / (high - low) * LEVELS)))
