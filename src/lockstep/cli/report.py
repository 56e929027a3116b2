"""`lockstep report`: what a run has recorded, as a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.report import find_run, read_run, write_page


def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, or of several, of which the last is taken.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page. Default: report.html in the run's folder.")
    ] = None,
) -> None:
    """Write what a run has recorded to one page of HTML.

    Curves, times by rank, evaluations, config and environment; the page opens without a network.
    """
    run = read_run(find_run(run_dir))
    page = out or run.folder / "report.html"
    write_page(run, page)
    for fault in run.faults:
        print(f"warning: {fault}", file=sys.stderr)
    print(page)
