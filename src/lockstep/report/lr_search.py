"""The picture of a search for a learning rate: the loss over the rate, on a log axis, with the suggestion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lockstep.report.chart import Chart, Line, buckets, figure_html
from lockstep.report.contents import points_of
from lockstep.report.records import Record, Run, number
from lockstep.report.scale import Scale, fitted, fitted_log, shown

_CURVES = {"smoothed": "smoothed_loss", "each update": "loss"}
_RISE_SHOWN = 0.5  # how far above the first loss the axis reaches, in terms of the fall: losses that diverge leave it


def suggestion_of(run: Run) -> float | None:
    """Return the rate that the run's last search suggests, or None."""
    return number(run.lr_search[-1].get("suggestion")) if run.lr_search else None


def lr_search_html(run: Run) -> tuple[str, dict[str, Any]] | None:
    """Return the picture of a run's search, and its values for the script; None if there is no search."""
    records = [record for record in run.lr_search if _is_rate(record)]
    lines = [Line(name, points_of(records, key, over="lr")) for name, key in _CURVES.items()]
    if (
        not records
        or records[0]["lr"] >= records[-1]["lr"]
        or not all(any(math.isfinite(y) for _, y in line.points) for line in lines)
    ):
        return None
    chart = Chart("Loss over learning rate", lines)
    # Every update is drawn: a search has few.
    curves = [buckets(line.points, most=len(line.points)) for line in lines]
    across = Scale(records[0]["lr"], records[-1]["lr"], log=True)
    up = fitted(_shown_part([bucket.mean for bucket in curves[0] if bucket.mean is not None]))
    log = fitted_log(bucket.mean for curve in curves for bucket in curve if bucket.mean is not None)
    suggested = suggestion_of(run)
    spoken = "Loss over learning rate: " + ("no rate" if suggested is None else shown(float(f"{suggested:.2g}")))
    mark, axes = _mark_html(suggested, across), (across, up, log)
    html, values = figure_html(chart, curves, curves, axes, kind="search", spoken=f"{spoken} is suggested", mark=mark)
    return html, {**values, "across": [across.low, across.high]}


def _is_rate(record: Record) -> bool:
    rate = number(record.get("lr"))
    return rate is not None and math.isfinite(rate) and rate > 0


def _shown_part(losses: Sequence[float]) -> list[float]:
    """Return the losses without those so high that the fall would look flat beside them."""
    first, lowest = losses[0], min(losses)
    return [loss for loss in losses if loss <= first + _RISE_SHOWN * (first - lowest)] if first > lowest else [*losses]


def _mark_html(suggested: float | None, across: Scale) -> str:
    if suggested is None or not across.low <= suggested <= across.high:
        return ""
    at = across.at(suggested)
    side = " left" if at > 0.7 else ""
    text = shown(float(f"{suggested:.2g}"))
    return f'<div class="mark{side}" style="left:{100 * at:.2f}%"><span>{text} suggested</span></div>'
