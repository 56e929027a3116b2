"""Key numbers and tables of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from statistics import median
from typing import Any

from lockstep.errors import ranks_in_words
from lockstep.report.contents import metric_names, points_of
from lockstep.report.figures import Point, best, shown, unit_html
from lockstep.report.records import MODES, Record, RunRecords, number

_TILE_METRICS = 2
_VERSIONS = ("lockstep", "torch", "cuda", "python", "platform")
_SLOW_PARTS = {"data": "wait for data", "compute": "forward and backward passes"}


def tiles_html(run: RunRecords) -> str:
    """Return the key numbers of a run as HTML tiles."""
    tiles = []
    if losses := points_of(run.train, "loss"):
        tiles.append(_tile("final loss", shown(losses[-1][1]), note="train"))
    tiles += [_metric_tile(run, name) for name in metric_names(run)[:_TILE_METRICS]]
    tiles += _median_tile(run, "samples_per_second", "throughput", "/s", f"{run.counted_in}, median")
    tiles += _median_tile(run, "tokens_per_second", "tokens", "/s", "median")
    tiles += _median_tile(run, "mfu", "MFU", "%", "of peak FLOP/s, median", scale=100) or _median_tile(
        run, "flops_per_second", "model FLOPs", "GFLOP/s", "median", scale=1e-9
    )
    tiles += _median_tile(run, "time", "step", "ms", "median", scale=1e3)
    if times := points_of(run.train, "time"):
        tiles.append(_tile("time in training", *_duration(_seconds_in_training(times)), "without validation"))
    if memory := points_of(run.train, "memory_mib"):
        tiles.append(_tile("peak memory", *_memory(max(value for _, value in memory)), "one rank"))
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def evaluations_html(run: RunRecords) -> str:
    """Return all evaluations as a table, with known best values in bold; an empty string if there are none."""
    if not run.evaluations:
        return ""
    names = metric_names(run)
    bests = {(mode, name): best(name, points_of(run.evaluated(mode), name)) for mode in MODES for name in names}
    heads = "".join(f"<th>{escape(name)}{unit_html(run.unit(name))}</th>" for name in ("iteration", *names))
    rows = []
    for record in run.evaluations:
        cells = [escape(str(record["mode"])), _plain(record.get("epoch")), _plain(record["iter"])]
        for name in names:
            text, top = _plain(record.get(name)), bests[record["mode"], name]
            cells.append(f"<b>{text}</b>" if top is not None and number(record.get(name)) == top[1] else text)
        rows.append(f"<tr><td>{'</td><td>'.join(cells)}</td></tr>")
    return (
        '<section><h2>Evaluations</h2><div class="card scroll" tabindex="0"><table>'
        f"<thead><tr><th></th><th>epoch</th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def stragglers_html(run: RunRecords) -> str:
    """Return the slow ranks as an HTML table, in the order in which they were found; an empty string if none was."""
    rows = [
        _straggler_row(run, place, record)
        for place, record in enumerate(run.stragglers)
        if str(record.get("part")) in _SLOW_PARTS
    ]
    if not rows:
        return ""
    heads = ("", "rank", "from iteration", "to", "ms", "other ranks", "lost per step")
    return (
        "<section><h2>Slow ranks <small>own work, without waiting for others; medians</small></h2>"
        '<div class="card scroll" tabindex="0"><table><thead><tr>'
        f"<th>{'</th><th>'.join(heads)}</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def environment_html(run: RunRecords) -> str:
    """Return the environment of the run as an HTML list; an empty string if it is not recorded."""
    known = run.environment
    if not known:
        return ""
    facts = [(name, known.get(name)) for name in ("command", "model", "seed", "backend", *_VERSIONS)]
    rows = [(name, str(value)) for name, value in facts if value is not None]
    ranks = known.get("ranks")
    rows += _ranks(ranks if isinstance(ranks, list) else [])
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    return f'<section><h2>Environment</h2><div class="card"><dl class="facts">{terms}</dl></div></section>'


def started(run: RunRecords) -> str:
    """Return when the run began; an empty string if that is not recorded."""
    try:
        moment = datetime.fromisoformat(str(run.environment.get("started")))
    except ValueError:
        return ""
    return f"{moment.day} {moment:%B %Y, %H:%M %Z}".strip()


def _metric_tile(run: RunRecords, name: str) -> str:
    """Return a tile with the best value of a metric, or with its last one if its name does not show which is best."""
    mode, points = next((mode, points) for mode in MODES if (points := points_of(run.evaluated(mode), name)))
    title, top = name.replace("_", " "), best(name, points)
    if top is None:
        return _tile(f"final {title}", shown(points[-1][1]), run.unit(name), mode)
    return _tile(f"best {title}", shown(top[1]), run.unit(name), f"{mode}, iteration {top[0]:,.0f}")


def _median_tile(run: RunRecords, name: str, title: str, unit: str, note: str, scale: float = 1.0) -> list[str]:
    """Return a tile with the median of what the training has recorded above 0, or no tile if that is nothing."""
    values = [value for _, value in points_of(run.train, name) if value > 0]
    return [_tile(title, shown(float(f"{scale * median(values):.3g}")), unit, note)] if values else []


def _tile(name: str, value: str, unit: str = "", note: str = "") -> str:
    noted = f"<dd><small>{escape(note)}</small></dd>" if note else ""
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{unit_html(unit)}</dd>{noted}</div>"


def _straggler_row(run: RunRecords, place: int, record: Record) -> str:
    rank, host = record.get("rank"), record.get("host")
    later = (other for other in run.stragglers[place + 1 :] if other.get("rank") == rank)
    end = next((_plain(other["iter"]) for other in later), "the end")
    cells = [
        _SLOW_PARTS[str(record["part"])],
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


def _seconds_in_training(times: Sequence[Point]) -> float:
    """Return the sum over all iterations. The time of each record is the mean over those since the record before."""
    iterations = [iteration for iteration, _ in times]
    # The start of the first record is inferred from its distance to the second one.
    begin = max(0.0, iterations[0] - (iterations[1] - iterations[0])) if len(iterations) > 1 else 0.0
    spans = [end - start for start, end in zip([begin, *iterations], iterations, strict=False)]
    return sum(span * seconds for span, (_, seconds) in zip(spans, times, strict=True))


def _duration(seconds: float) -> tuple[str, str]:
    if not 60 <= seconds < math.inf:
        return f"{seconds:.1f}", "s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}", "min"
    return f"{minutes // 60}:{minutes % 60:02}", "h"


def _memory(mib: float) -> tuple[str, str]:
    return (f"{mib:,.0f}", "MiB") if mib < 10_000 else (f"{mib / 1024:,.1f}", "GiB")


def _ranks(ranks: Iterable[Any]) -> list[tuple[str, str]]:
    """Return a line for all ranks with the same description."""
    alike: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        if isinstance(facts, dict):
            alike.setdefault(_describe(facts), []).append(rank)
    return [(ranks_in_words(members), text) for text, members in alike.items()]


def _describe(facts: dict[str, Any]) -> str:
    threads = facts.get("threads")
    kind = str(facts.get("device")).partition(":")[0]
    return f"{facts.get('host')}, {kind} ({facts.get('device_name')}), {threads} thread{'s' if threads != 1 else ''}"
