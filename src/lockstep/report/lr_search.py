"""The picture of a search for a learning rate: the loss over the rate, on a log axis, with the suggestion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lockstep.report.chart import Chart, Line, across_html, buckets, latest, layer_html, legend_html, values_of
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
    lines = [Line(name, _points(records, key)) for name, key in _CURVES.items()]
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
    layers = layer_html(chart, curves, across, up, "linear")
    if log is not None:
        layers += layer_html(chart, curves, across, log, "log")
    legend = "".join(legend_html(i, line.name, latest(curves[i])) for i, line in enumerate(lines))
    toggle = '<button type="button" aria-pressed="false">log</button>' if log is not None else ""
    suggested = suggestion_of(run)
    spoken = "Loss over learning rate: " + ("no rate" if suggested is None else shown(float(f"{suggested:.2g}")))
    html = (
        f'<figure class="card search"><figcaption><h3>{chart.title}</h3>{toggle}<ul>{legend}</ul></figcaption>'
        f'<div class="plot" tabindex="0" role="img" aria-label="{spoken} is suggested">{layers}'
        f'{_mark_html(suggested, across)}{across_html(across)}<div class="cursor" hidden></div></div></figure>'
    )
    values = {
        "lines": [values_of(curve) for curve in curves],
        "stacked": False,
        "linear": [up.low, up.high],
        "log": None if log is None else [log.low, log.high],
        "across": [across.low, across.high],
    }
    return html, values


def _points(records: Sequence[Record], key: str) -> list[tuple[float, float]]:
    return [(float(record["lr"]), value) for record in records if (value := number(record.get(key))) is not None]


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
