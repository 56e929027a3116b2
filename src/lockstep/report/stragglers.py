"""The ranks that kept the others waiting, as a table."""

from __future__ import annotations

from html import escape

from lockstep.report.records import Record, Run, number
from lockstep.report.scale import shown

_PARTS = {
    "data": "wait for data",
    "compute": "forward and backward passes",
    "communication": "communication hook",
}


def stragglers_html(run: Run) -> str:
    """Return the slow ranks of a run as an HTML table, in the order in which they were found; "" if there are none."""
    rows = [_row(run, place, record) for place, record in enumerate(run.stragglers) if record.get("part") in _PARTS]
    if not rows:
        return ""
    heads = ("", "rank", "from iteration", "to", "ms", "other ranks", "lost per step")
    return (
        "<section><h2>Slow ranks <small>own work, without waiting for others; medians</small></h2>"
        '<div class="card scroll" tabindex="0"><table><thead><tr>'
        f"<th>{'</th><th>'.join(heads)}</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _row(run: Run, place: int, record: Record) -> str:
    rank, host = record.get("rank"), record.get("host")
    later = (other for other in run.stragglers[place + 1 :] if other.get("rank") == rank)
    end = next((_plain(other["iter"]) for other in later), "the end")
    cells = [
        _PARTS[str(record["part"])],
        f"{_plain(rank)}{f' ({escape(str(host))})' if host else ''}",
        _plain(record.get("begin")),
        end,
        *(_milliseconds(record.get(name)) for name in ("seconds", "others", "lost")),
    ]
    return f"<tr><td>{'</td><td>'.join(cells)}</td></tr>"


def _plain(value: object) -> str:
    found = number(value)
    return "" if found is None else shown(found)


def _milliseconds(value: object) -> str:
    found = number(value)
    return "" if found is None else shown(float(f"{1e3 * found:.3g}"))
