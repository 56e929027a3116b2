"""The report page: everything about one run in one file that needs no network."""

from __future__ import annotations

import json
import math
import os
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lockstep.errors import ConfigError, counted
from lockstep.masking import mask_text
from lockstep.report.contents import charts_of
from lockstep.report.facts import environment_html, evaluations_html, started, stragglers_html, tiles_html
from lockstep.report.figures import chart_html
from lockstep.report.records import RunRecords, number

# The browser enforces that the page loads nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page_html(run: RunRecords, place: Path) -> str:
    """Return the report of a run as one page of HTML.

    Args:
        run: the records.
        place: the folder that the page will be in, for its links to runs that were resumed.
    """
    charts = [chart_html(chart) for chart in charts_of(run)]
    values = {
        "across": _across(run),
        "epochs": _epochs(run),
        "resumed": [at for _, at in run.resumed],
        "charts": [drawn for _, drawn in charts],
    }
    curves = f'<div class="grid">{"".join(html for html, _ in charts)}</div>'
    title = escape(f"{run.folder.resolve().parent.name} {run.folder.resolve().name}")
    return "".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f"<title>{title}</title><style>{_asset('uplot/uPlot.min.css')}{_asset('page.css')}</style></head><body>",
            _header(run, place),
            f"<main>{tiles_html(run)}<noscript><p>JavaScript draws the curves of this page.</p></noscript>",
            f"<section><h2>Curves <small>by iteration</small></h2>{curves}</section>" if charts else "",
            stragglers_html(run),
            f'<div class="pair">{evaluations_html(run)}{environment_html(run)}</div>',
            _config_html(run),
            f'</main><script type="application/json" id="values">{_script_json(values)}</script>',
            f"<script>/*\n{_asset('uplot/LICENSE')}\n*/{_asset('uplot/uPlot.iife.min.js')}</script>",
            f"<script>{_asset('page.js')}</script></body></html>\n",
        ]
    )


def write_page(run: RunRecords, path: Path) -> None:
    """Write the report of a run to a file.

    Raises:
        ConfigError: it cannot be written.
    """
    html = page_html(run, path.parent)
    try:
        path.write_text(html, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to `{path}`: {error.strerror}. `--out` names another file"
        ) from error


def _across(run: RunRecords) -> tuple[int, int]:
    """Return the first and the last iteration of the axis that all curves share."""
    resumed_after = run.resumed[0][1] if run.resumed else 0
    # The records of what was resumed first may be gone.
    low = 0 if any(record["iter"] <= resumed_after for record in run.train) else resumed_after
    return low, max([low + 1, *(record["iter"] for record in (*run.train, *run.evaluations))])


def _epochs(run: RunRecords) -> list[tuple[int, int]]:
    """Return pairs of an epoch and its last recorded iteration."""
    epochs = [(number(record.get("epoch")), record["iter"]) for record in run.train]
    return list({int(epoch): at for epoch, at in epochs if epoch is not None and math.isfinite(epoch)}.items())


def _header(run: RunRecords, place: Path) -> str:
    known = run.environment
    size = known.get("world_size")
    ranks = None if size is None else counted(size, "rank")
    line = " · ".join(escape(str(part)) for part in (ranks, known.get("model"), started(run)) if part)
    faults = "".join(f"<li>{escape(fault)}</li>" for fault in run.faults)
    folder = run.folder.resolve()
    parts = ", ".join(
        f'after iteration {at:,} of <a href="{_link(before, place)}/">{escape(before.name)}</a>'
        for before, at in run.resumed
    )
    end = ""
    if run.failed is not None:
        at = f" at {run.failed['at']}" if run.failed.get("at") else ""
        end = f"failed after iteration {run.failed['iter']:,}{at}: {run.failed.get('error', '')}"
    return (
        f"<header><p>{escape(folder.parent.name)}</p><h1>{escape(folder.name)}</h1><p>{line}</p>"
        f"{f'<p>resumed {parts}</p>' if parts else ''}"
        f"{f'<ul class=faults><li>{escape(mask_text(end))}</li></ul>' if end else ''}"
        f"{f'<ul class=faults>{faults}</ul>' if faults else ''}</header>"
    )


def _link(folder: Path, place: Path) -> str:
    return quote(os.fsencode(os.path.relpath(folder, place.resolve())))  # as bytes: those of a name may be no UTF-8


def _config_html(run: RunRecords) -> str:
    if not run.config:
        return ""
    return (
        '<section><h2>Config</h2><div class="card scroll" tabindex="0">'
        f"<pre><code>{highlighted(run.config)}</code></pre></div></section>"
    )


def _asset(name: str) -> str:
    return files("lockstep.report").joinpath(name).read_text(encoding="utf-8")


def _script_json(values: Any) -> str:
    """Return JSON in which no value can end the script element around it."""
    return json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def highlighted(source: str) -> str:
    """Return Python source as HTML, with pygments' class for each token that has a colour.

    Example:
        >>> print(highlighted("lr = 1e-3"), end="")
        <span class="n">lr</span> <span class="o">=</span> <span class="mf">1e-3</span>
    """
    from pygments import highlight
    from pygments.formatters.html import HtmlFormatter
    from pygments.lexers.python import PythonLexer

    return str(highlight(source, PythonLexer(stripnl=False, ensurenl=False), HtmlFormatter(nowrap=True)))
